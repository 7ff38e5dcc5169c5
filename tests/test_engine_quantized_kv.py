"""Engines over caches of one byte a value: pressure changes no token, and only K and V of attention are stored so."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import ConfigError
from pagebinder.models import tiny_path
from tests.helpers import VOCAB_SIZE, by_day, tiny_llama, tiny_mistral, tiny_qwen3_next
from tests.models.test_tiny_checkpoint import EXCERPT

pytestmark = pytest.mark.usefixtures("captured_once")

PREFIX = [(11 * i) % VOCAB_SIZE for i in range(40)]
PROMPTS = [PREFIX[: 5 + 9 * i] + [(7 * i + j) % VOCAB_SIZE for j in range(4)] for i in range(6)]
MODELS = {"llama": tiny_llama, "mistral-window": lambda: tiny_mistral(20)}


@functools.cache
def compiled_with(model: str, kv_dtype: str):
    config = CompileConfig(executable="eager", block_size=16, kv_dtype=kv_dtype)
    return pagebinder.compile_model(MODELS[model](), config)


def serve(compiled, **options):
    options = {"num_kv_blocks": 200, "max_num_batched_tokens": 16, "check_integrity": True, **options}
    engine = compiled.engine(EngineConfig(**options))
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=3, n=2)
    tokens = [o.token_ids for o in engine.generate(PROMPTS, params)]
    return engine.stats(), tokens


@pytest.mark.parametrize(
    ("model", "kv_dtype"),
    [("llama", "fp8_e4m3"), ("mistral-window", "int8"), ("mistral-window", "fp8_e5m2_per_head")],
)
def test_pressure_changes_no_token(model, kv_dtype):
    """Prefix hits, samples that share a prompt, preemption by recomputing and by swapping."""
    compiled = compiled_with(model, kv_dtype)
    free, expected = serve(compiled, prefix_caching=False)
    assert free.forks > 0 and free.preemptions == 0
    for options in (
        {},
        {"num_kv_blocks": 14},
        {"num_kv_blocks": 14, "swap_bytes": 1 << 22, "swap_policy": "always"},
    ):
        stats, tokens = serve(compiled, **options)
        assert tokens == expected
        assert stats.prefix_hit_tokens > 0 and stats.copies > 0
        assert (stats.preemptions > 0) == bool(options)
        assert (stats.swaps_out > 0) == ("swap_bytes" in options)


@pytest.mark.parametrize(
    ("kv_dtype", "row_bytes"), [("fp8_e4m3", 40), ("int8", 40), ("fp8_e5m2_per_tensor", 32)]
)
def test_a_row_is_a_byte_a_value_and_the_plan_knows(kv_dtype, row_bytes):
    compiled = compiled_with("llama", kv_dtype)
    assert [state.layout for state in compiled.states] == [kv_dtype] * 2
    assert compiled.states[0].entry_bytes == 2 * row_bytes  # two heads of 16 + 16 values
    assert compiled.kv_spec.bytes_per_block == 2 * 16 * 2 * row_bytes
    assert kv_dtype in compiled.explain()
    targets = [str(n.target) for n in compiled.graphs["fused"].graph.nodes]
    assert targets.count("pagebinder_cpu.quantized_paged_attention.default") == 2
    assert not any(
        "quantized_kv.default" in t or "kv_cache_write.default" in t.split("quantized_")[0] for t in targets
    )


def test_fixed_scales_come_from_a_file(tmp_path):
    layers = [state.layer for state in compiled_with("llama", "int8").states]
    scales = torch.tensor([[0.01, 0.02], [0.04, 0.03]])
    path, options = (
        tmp_path / "scales.safetensors",
        {"executable": "eager", "kv_dtype": "fp8_e4m3_per_tensor"},
    )
    for names, problem in ((layers[:1], "lack the attention layer"), (layers, None)):
        save_file({name: scales.clone() for name in names}, path)
        config = CompileConfig(**options, kv_scales=path)
        if problem:
            with pytest.raises(ConfigError, match=problem):
                pagebinder.compile_model(tiny_llama(), config)
    stored = pagebinder.compile_model(tiny_llama(), config).graphs["fused"].kv_scales_1
    assert torch.equal(stored, torch.tensor([[0.02, 0.02], [0.04, 0.04]]))  # the larger head's, for all
    with pytest.raises(ConfigError, match="cannot be read"):
        pagebinder.compile_model(tiny_llama(), CompileConfig(**options, kv_scales=tmp_path / "none"))
    with pytest.raises(ConfigError, match="kv_scales"):
        CompileConfig(kv_dtype="fp8_e4m3", kv_scales=path)


def test_only_attention_is_quantised_in_a_model_with_states():
    config = CompileConfig(executable="eager", kv_dtype="int8")
    compiled = pagebinder.compile_model(tiny_qwen3_next(), config)
    layouts = {state.kind: getattr(state, "layout", None) for state in compiled.states}
    assert layouts == {"full_attention": "int8", "recurrent": None, "short_conv": None}
    engine = compiled.engine(EngineConfig(num_kv_blocks=60))
    assert len(engine.generate([PREFIX], SamplingParams(max_tokens=5))[0].token_ids) == 5


def test_a_model_without_such_attention_is_told():
    from tests.test_engine_mla import source

    with pytest.raises(ConfigError, match=r"kv_dtype='fp8_e4m3'.*no attention whose K and V"):
        model = source("deepseek_v3", num_hidden_layers=1)
        pagebinder.compile_model(model, CompileConfig(executable="eager", kv_dtype="fp8_e4m3"))


@pytest.mark.parametrize("kv_dtype", by_day(["fp8_e4m3", "int8", "fp8_e5m2_per_head"], ["fp8_e5m2_per_head"]))
def test_verified_step_by_step(kv_dtype):
    """The quantisation itself is measured, all else is judged, and its rounding is certified on random rows."""
    config = CompileConfig(
        executable="eager", block_size=16, kv_dtype=kv_dtype, verify="full", max_model_len=64
    )
    report = pagebinder.compile_model(tiny_mistral(20), config).report
    lines = {line.name: line for line in report.verified}
    assert not lines["quantize_kv"].judged and lines["quantize_kv"].max_rel_error > 1e-3
    assert lines["page_attention"].judged and lines["page_attention"].max_rel_error < 2e-4
    (quantized,) = (result for result in report.passes if result.name == "quantize_kv")
    assert len(quantized.matches) == 2 and quantized.certificates[0].count == 2


@functools.cache
def bits_per_byte(kv_dtype: str) -> float:
    compiled = pagebinder.compile_model(tiny_path(), CompileConfig(executable="eager", kv_dtype=kv_dtype))
    tokenizer = compiled.source.tokenizer()
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(EXCERPT)["input_ids"]])[:1024]
    logits = compiled.run_level("fused", ids).float()
    nats = F.cross_entropy(logits[:-1], ids[1:], reduction="sum").item()
    return nats / math.log(2) / len(tokenizer.decode(ids[1:]).encode())


@pytest.mark.parametrize(
    ("kv_dtype", "most"),
    by_day(
        [("fp8_e4m3", 0.003), ("fp8_e5m2", 0.006), ("int8", 0.003), ("fp8_e4m3_per_head", 0.003)],
        [("fp8_e4m3", 0.003), ("int8", 0.003)],
    ),
)
def test_bytes_cost_the_shipped_model_little(kv_dtype, most):
    assert bits_per_byte(kv_dtype) < bits_per_byte("auto") * (1 + most)
