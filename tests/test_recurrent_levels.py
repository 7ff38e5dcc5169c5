"""Models with recurrent layers: every level equals transformers, eager and compiled by inductor; miscounts."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from transformers import Mamba2Config
from transformers.models.qwen3_next import modeling_qwen3_next

import pagebinder
from pagebinder import CaptureError, CompileConfig
from pagebinder.compile import explain_model
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.executables import EagerExecutable, InductorExecutable
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.helpers import by_day, nightly, tiny_lfm2, tiny_mamba2, tiny_qwen3_next

pytestmark = pytest.mark.usefixtures("captured_once")

LEVELS = ("captured", "semantic", "paged", "fused")
LENGTHS = (1, 2, 40, 77)
TOLERANCE = 1e-4
MODELS = {
    "qwen3-next": tiny_qwen3_next,
    "mamba2": tiny_mamba2,
    "mamba2-limits": lambda: tiny_mamba2(time_step_limit=(0.2, 0.9), n_groups=1, use_conv_bias=False),
    "lfm2": tiny_lfm2,
}
KINDS = {
    "qwen3-next": ["short_conv", "recurrent"] * 3 + ["full_attention"],
    "mamba2": ["short_conv", "recurrent"] * 2,
    "mamba2-limits": ["short_conv", "recurrent"] * 2,
    "lfm2": ["short_conv", "full_attention", "short_conv", "short_conv"],
}


@functools.cache
def compiled_pair(name: str, dtype: torch.dtype):
    compiled = pagebinder.compile_model(MODELS[name](), CompileConfig(executable="eager", dtype=dtype))
    return compiled.source.module, compiled


def logits(model, ids):
    with torch.no_grad():
        return model(ids[None], use_cache=False).logits[0]


def tokens(num_tokens):
    return torch.randint(128, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_every_level_equals_the_source_in_float32(name, level, num_tokens):
    model, compiled = compiled_pair(name, torch.float32)
    expected = logits(model, tokens(num_tokens))
    assert expected.std() > 0.3, "weights too small to show errors"
    torch.testing.assert_close(
        compiled.run_level(level, tokens(num_tokens)), expected, atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", by_day(MODELS, ["mamba2"]))
def test_every_level_in_bfloat16_is_as_close_to_float32_as_the_source(name, level):
    model, compiled = compiled_pair(name, torch.bfloat16)
    exact_model = MODELS[name]()
    exact_model.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    for num_tokens in (5, 77):
        exact, own = logits(exact_model, tokens(num_tokens)), logits(model, tokens(num_tokens))
        got = compiled.run_level(level, tokens(num_tokens))
        own_error = (own.float() - exact).square().mean().sqrt()
        assert (got.float() - exact).square().mean().sqrt() <= 2 * own_error


@pytest.mark.parametrize("name", MODELS)
def test_what_is_reported(name):
    _, compiled = compiled_pair(name, torch.float32)
    assert [state.kind for state in compiled.states] == KINDS[name]
    assert compiled.source.num_attention_layers == KINDS[name].count("full_attention")
    text = compiled.explain()
    assert "leaves" in text and "page_recurrent" in text and "short_conv" in text


@pytest.mark.parametrize("name", MODELS)
def test_the_far_past_matters(name):
    """What these tests can see: the first token changes the logits of the last one."""
    model, _ = compiled_pair(name, torch.float32)
    other = tokens(40).clone()
    other[0] = (other[0] + 1) % 128
    difference = (logits(model, tokens(40)) - logits(model, other)).abs().max(-1).values
    assert difference[3] > 0.01 and (name == "lfm2" or difference[-1] > 100 * TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_chunked_prefill_and_decode_equal_one_sequence(name):
    """The fused graph over one arena, in chunks that end inside, at and behind block boundaries."""
    model, compiled = compiled_pair(name, torch.float32)
    ids, parts = tokens(77), []
    plan, states = compiled.kv_spec, compiled.states
    arena = KVArena(plan, states, 1 + len(plan.groups) * 6, torch.device("cpu"))
    cuts = [0, 30, 31, 32, 33, 64, 65, 77]
    for start, end in itertools.pairwise(cuts):
        inputs = single_sequence_inputs(plan, states, ids[start:end], start=start, arena=arena)
        parts.append(EagerExecutable(compiled.graphs["fused"]).run(inputs))
    torch.testing.assert_close(torch.cat(parts), logits(model, ids), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            lambda: tiny_qwen3_next(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
            marks=nightly,
        ),
        tiny_mamba2,
    ],
    ids=["qwen3-next", "mamba2"],
)
def test_inductor_equals_eager_and_writes_the_same_states(build):
    compiled = pagebinder.compile_model(build(), CompileConfig(executable="inductor"))
    assert isinstance(compiled.executable, InductorExecutable)
    for num_tokens in LENGTHS:
        inputs, other = (
            single_sequence_inputs(compiled.kv_spec, compiled.states, tokens(num_tokens)) for _ in range(2)
        )
        got, expected = compiled.executable.run(inputs), compiled.run_level("fused", tokens(num_tokens))
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
        EagerExecutable(compiled.graphs["fused"]).run(other)
        for cache in (key for key in inputs if key.startswith("kv_cache_")):
            assert inputs[cache].any()
            torch.testing.assert_close(inputs[cache], other[cache], atol=TOLERANCE, rtol=TOLERANCE)


def test_grouped_keys_reach_transformers_exact_recurrence(monkeypatch):
    """Against transformers' token-by-token form, which is the more exact of its two."""
    model, compiled = compiled_pair("qwen3-next", torch.float32)
    exact = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", exact)
    torch.testing.assert_close(
        compiled.run_level("fused", tokens(77)), logits(model, tokens(77)), atol=TOLERANCE, rtol=TOLERANCE
    )


def test_a_config_alone_is_explained_without_weights():
    config = Mamba2Config(num_hidden_layers=2, vocab_size=64)
    compiled = explain_model(config)
    assert [state.shape for state in compiled.states] == [(10240, 3), (128, 64, 128)] * 2
    assert "128 x 64 x 128" in compiled.explain()


@pytest.mark.parametrize(
    ("build", "changes", "message"),
    [
        (tiny_mamba2, {"num_hidden_layers": 3}, "2 recurrent layers were found, but the config says 3"),
        (tiny_lfm2, {"layer_types": ["full_attention"] * 4}, "1 attention layers were found, .* says 4"),
        (tiny_lfm2, {"layer_types": ["full_attention"] * 4}, "3 recurrent layers were found, .* says 0"),
    ],
)
def test_layers_that_the_config_counts_otherwise_are_an_error(build, changes, message):
    """The config is changed behind the built model's back, as if a layer had been missed."""
    model = build()
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(CaptureError, match=message):
        pagebinder.compile_model(model, CompileConfig(executable="eager"))
