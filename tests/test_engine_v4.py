"""Serving DeepSeek-V4: logits and tokens are the source model's, however the work is cut and shared.

Every step's logits are compared with one run of the source over the request's whole sequence, so each prompt also
compares prefill with decode.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import contextmanager

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from tests.helpers import VOCAB_SIZE, by_day, tiny_llama
from tests.v4_models import CSA, HCA, TOPK, v4_model

pytestmark = pytest.mark.usefixtures("captured_once")

KINDS = {"sliding_window_mla", "compressed_latent", "recurrent"}
# Checkpoints every 64 tokens, so that short prompts reach them.
SHORT = {"contexts": ((64, 1.0),), "concurrency": 4, "chunk_tokens": 24, "tokens_in_flight": 8.0}
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
LOGITS_TOLERANCE = 1e-4


@functools.cache
def source():
    return v4_model()


@functools.cache
def compiled(executable: str = "eager"):
    config = CompileConfig(executable=executable, max_model_len=512, workload=SHORT)
    return pagebinder.compile_model(source(), config)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + num_tokens)
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@contextmanager
def recorded_logits(engine):
    """Every row of logits that the engine's steps compute, with the tokens that it follows from."""
    rows, executable = [], engine.model.executable

    class Recorder:
        name = executable.name

        def run(self, inputs):
            logits = executable.run(inputs)
            rows.append((inputs["positions"][inputs["logits_rows"]].clone(), logits.detach().clone()))
            return logits

    engine.loop.model = dataclasses.replace(engine.model, executable=Recorder())
    yield rows


def assert_as_source(prompt_ids: list[int], output) -> torch.Tensor:
    """Each token is the source's greedy choice; returns the source's logits for them."""
    continuation = list(output.token_ids)
    assert len(continuation) == GREEDY.max_tokens
    with torch.no_grad():
        logits = source()(torch.tensor([prompt_ids + continuation]), use_cache=False).logits[0]
    logits = logits[len(prompt_ids) - 1 : -1]
    assert logits.std() > 0.3, "weights too small to show errors"
    assert logits.argmax(1).tolist() == continuation
    return logits


def engine_of(**options) -> pagebinder.runtime.engine.Engine:
    defaults = {
        "num_kv_blocks": 400,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "check_integrity": True,
    }
    return compiled().engine(EngineConfig(**{**defaults, **options}))


def test_states_of_every_kind():
    model = compiled()
    assert {state.kind for state in model.states} == KINDS
    # One window a layer; sums and entries of a compressor; the same of an indexer.
    assert len(model.states) == 4 + 2 * 4 + 1 * 2
    # Streams are no sums, layers this narrow are no linears of ours, and routers that look a token up are no scores.
    known = {"add_rms_norm", "linear", "gated_linear", "moe_routed_experts"}
    assert {r.pattern for r in model.report.refusals} <= known


@pytest.mark.parametrize("chunk", [1, 3, 16, 64, 300])
def test_logits_whatever_the_chunks(chunk):
    engine = engine_of(max_num_batched_tokens=chunk, max_num_seqs=1, prefix_caching=False)
    with recorded_logits(engine) as rows:
        ids = prompt(150, seed=chunk)
        (output,) = engine.generate([ids], GREEDY)
    ours = torch.cat([logits for _, logits in rows])
    assert (ours - assert_as_source(ids, output)).abs().max() <= LOGITS_TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 11, 12, 13, 15, 16, 17, 63, 64, 65, 129])
def test_prompts_at_every_edge(num_tokens):
    ids = prompt(num_tokens)
    (output,) = engine_of(max_num_batched_tokens=300).generate([ids], GREEDY)
    assert_as_source(ids, output)


def test_mixed_batches_and_prefix_hits():
    engine = engine_of(max_num_seqs=3)
    shared = prompt(140)
    prompts = [prompt(5), shared, prompt(37), prompt(1), shared[:133] + prompt(9, seed=1), shared, prompt(70)]
    outputs = engine.generate(prompts, GREEDY)
    assert sum(output.num_cached_tokens >= 64 for output in outputs) >= 2
    for ids, output in zip(prompts, outputs):
        assert_as_source(ids, output)


def test_preemption_with_recompute_and_with_swap():
    needed = compiled().kv_spec.min_blocks(90, 32)
    prompts = [prompt(n, seed=3) for n in (58, 59, 60)]
    for options in ({}, {"swap_bytes": 1 << 24, "swap_policy": "always"}):
        engine = engine_of(num_kv_blocks=needed + 4, max_num_seqs=3, max_num_batched_tokens=32, **options)
        outputs = engine.generate(prompts, GREEDY)
        assert engine.stats().preemptions
        for ids, output in zip(prompts, outputs):
            assert_as_source(ids, output)


def test_forks_go_their_own_ways():
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, n=3)
    ids = prompt(45)
    first = engine_of().generate([ids], params)
    again = engine_of(max_num_batched_tokens=7, prefix_caching=False).generate([ids], params)
    assert [o.token_ids for o in first] == [o.token_ids for o in again]
    assert len({tuple(o.token_ids) for o in first}) == 3


def test_inductor_runs_the_same():
    engine = compiled("inductor").engine(
        EngineConfig(num_kv_blocks=400, max_num_seqs=3, max_num_batched_tokens=24)
    )
    prompts = [prompt(5), prompt(77), prompt(33)]
    for ids, output in zip(prompts, engine.generate(prompts, GREEDY)):
        assert_as_source(ids, output)


@functools.cache
def compiled_bytes(index_dtype: str, topk: int = TOPK):
    config = CompileConfig(
        executable="eager", max_model_len=512, workload=SHORT, kv_dtype="fp8_ds_mla", index_dtype=index_dtype
    )
    return pagebinder.compile_model(v4_model(index_topk=topk), config)


@pytest.mark.parametrize("index_dtype", by_day(["auto", "mxfp4"], ["mxfp4"]))
def test_8_bit_caches_give_the_same_whatever_the_chunks(index_dtype):
    served = compiled_bytes(index_dtype)
    layouts = {getattr(state, "layout", None) for state in served.states}
    assert layouts == {"fp8_v4", "fp4_index" if index_dtype == "mxfp4" else "fp8_index", None}
    ids, tokens = prompt(150), set()
    for chunk in (7, 300):
        engine = served.engine(EngineConfig(num_kv_blocks=400, max_num_batched_tokens=chunk))
        first, again = engine.generate([ids], GREEDY) + engine.generate([ids], GREEDY)
        assert again.num_cached_tokens >= 64
        tokens |= {tuple(first.token_ids), tuple(again.token_ids)}
    assert len(tokens) == 1


def test_8_bit_rows_change_logits_a_little():
    """Where the indexer leaves nothing out; a rounded score may choose another entry, which is no small change."""
    ids, model = prompt(150), v4_model(index_topk=64)
    engine = compiled_bytes("auto", 64).engine(EngineConfig(num_kv_blocks=400, max_num_batched_tokens=300))
    with recorded_logits(engine) as rows:
        engine.generate([ids], GREEDY)
    with torch.no_grad():
        exact = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    error = (rows[0][1][0] - exact).std() / exact.std()
    assert 0 < error < 0.15  # 3 bits of mantissa in every row of four layers


def test_an_8_bit_format_needs_latent_rows():
    with pytest.raises(pagebinder.ConfigError, match="latent rows"):
        pagebinder.compile_model(tiny_llama(), CompileConfig(kv_dtype="fp8_ds_mla", executable="eager"))


def test_rows_that_do_not_fit_a_layout_are_told():
    for options, name in (({"head_dim": 48}, "kv_dtype"), ({"index_head_dim": 34}, "index_dtype")):
        config = CompileConfig(executable="eager", kv_dtype="fp8_ds_mla")
        with pytest.raises(pagebinder.ConfigError, match=f"do not fit the layout that {name}"):
            pagebinder.compile_model(v4_model(**options), config)


def test_ratios_that_divide_no_power_of_two():
    model = v4_model(compress_rates={CSA: 3, HCA: 20})
    served = pagebinder.compile_model(model, CompileConfig(executable="eager", max_model_len=256))
    ids = prompt(70)
    (output,) = served.engine(EngineConfig(num_kv_blocks=100, max_num_batched_tokens=9)).generate(
        [ids], GREEDY
    )
    with torch.no_grad():
        logits = model(torch.tensor([ids + list(output.token_ids)]), use_cache=False).logits[0]
    assert logits[len(ids) - 1 : -1].argmax(1).tolist() == list(output.token_ids)
