"""Models that mix full attention with windows or chunks: every level equals the source, whole or continued."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig
from pagebinder.frontend import capture as capture_module
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.executables import EagerExecutable
from pagebinder.runtime.single_sequence import single_sequence_inputs
from tests.helpers import (
    VOCAB_SIZE,
    by_day,
    nightly,
    scale_weights,
    tiny_cohere2,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_llama4,
)

pytestmark = pytest.mark.usefixtures("captured_once")

LEVELS = ("captured", "semantic", "paged", "fused")
LENGTHS = (1, 2, 40, 77, 130)
TOLERANCE = 1e-4
# Steps of one sequence: they begin and end in the middle of chunks, windows and blocks, and decode in between.
CUTS = (0, 7, 23, 40, 41, 42, 100, 130)

MODELS = {
    "llama4-chunk-16": tiny_llama4,
    "llama4-chunk-24": lambda: tiny_llama4(24),
    "gemma3": tiny_gemma3,
    "gemma2": tiny_gemma2,
    "cohere2": tiny_cohere2,
    "gpt-oss": tiny_gpt_oss,
}
# The others are served in test_engine_mixed_layers.py.
BY_DAY = ("llama4-chunk-16", "gemma3", "cohere2", "gpt-oss")
# Llama 4 with one layer of each kind: in chunks with RoPE, in full without.
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}
CHUNKED = ["chunked_local"] * 3 + ["full_attention"]
WINDOWED = ["sliding_window", "full_attention"] * 2


@functools.cache
def compiled_pair(name: str, dtype: torch.dtype = torch.float32):
    """(source model in dtype, compiled model), compiled once."""
    compiled = pagebinder.compile_model(MODELS[name](), CompileConfig(executable="eager", dtype=dtype))
    return compiled.source.module, compiled


def logits(model, ids):
    with torch.no_grad():
        return model(ids[None], use_cache=False).logits[0]


def tokens(num_tokens):
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))


def in_steps(compiled, executable, ids, cuts):
    """Logits of one sequence, computed in several steps over one cache."""
    groups = compiled.kv_spec.groups
    num_blocks = 1 + len(groups) * max(-(-len(ids) // group.block_size) for group in groups)
    arena = KVArena(compiled.kv_spec, compiled.states, num_blocks, ids.device)
    steps = (
        single_sequence_inputs(compiled.kv_spec, compiled.states, ids[start:end], start=start, arena=arena)
        for start, end in itertools.pairwise(cuts)
    )
    return torch.cat([executable.run(inputs) for inputs in steps])


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_every_level_equals_the_source(name, level, num_tokens):
    model, compiled = compiled_pair(name)
    expected = logits(model, tokens(num_tokens))
    assert expected.std() > 0.3, "weights too small to show errors"
    got = compiled.run_level(level, tokens(num_tokens))
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("level", ["paged", "fused"])
@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_a_sequence_in_steps_equals_the_whole(name, level):
    model, compiled = compiled_pair(name)
    ids = tokens(CUTS[-1])
    got = in_steps(compiled, EagerExecutable(compiled.graphs[level]), ids, CUTS)
    torch.testing.assert_close(got, logits(model, ids), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_the_kind_of_every_layer(name):
    _, compiled = compiled_pair(name)
    assert [s.kind for s in compiled.states] == (CHUNKED if name.startswith("llama4") else WINDOWED)
    assert (
        {s.chunk for s in compiled.states} - {None} <= {int(name.split("-")[-1])} if "chunk" in name else True
    )


def test_a_chunk_hides_earlier_keys():
    """The comparison above could not see chunks that nothing depends on."""
    model, _ = compiled_pair("llama4-chunk-16")
    wide = tiny_llama4(512)
    wide.load_state_dict(model.state_dict())
    ids = tokens(40)
    difference = (logits(model, ids) - logits(wide, ids)).abs().amax(1)
    assert difference[:16].max() < TOLERANCE and difference[16:].max() > 0.1


# Attention of every kind is an opaque call to inductor: one model by day.
COMPILED = ["gpt-oss", *(pytest.param(name, marks=nightly) for name in ("llama4-chunk-24", "gemma3"))]


@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_executable_equals_the_source(name):
    model, _ = compiled_pair(name)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="inductor"))
    ids = tokens(CUTS[-1])
    for cuts in ((0, CUTS[-1]), CUTS):
        got = in_steps(compiled, compiled.executable, ids, cuts)
        torch.testing.assert_close(got, logits(model, ids), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", by_day(MODELS, ["gpt-oss"]))
def test_bfloat16_is_as_close_to_float32_as_the_source(name, level):
    model, compiled = compiled_pair(name, torch.bfloat16)
    exact_model = MODELS[name]()
    exact_model.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    ids = tokens(77)
    exact, own, got = logits(exact_model, ids), logits(model, ids), compiled.run_level(level, ids)
    assert got.dtype is own.dtype is torch.bfloat16
    own_error = (own.float() - exact).square().mean().sqrt()
    assert (got.float() - exact).square().mean().sqrt() <= 2 * own_error


def test_llama4_is_matched_whole():
    _, compiled = compiled_pair("llama4-chunk-16")
    by_pass = {p.name: p for p in compiled.report.passes}
    details = [m.detail for m in by_pass["attention_hook"].matches]
    assert details == ["chunk=16"] * 3 + [""]
    assert [m.detail for m in by_pass["recognise_rope"].matches] == ["style=interleaved, dim=16"] * 6
    assert len(by_pass["recognise_rms_norm"].matches) == 2 * 4 + 1 + 2 * 3
    assert not by_pass["recognise_rope"].refusals and not by_pass["recognise_rms_norm"].refusals
    complex_nodes = [n for n in compiled.graphs["semantic"].graph.nodes if "complex" in str(n.target)]
    assert not complex_nodes


def test_rope_scaling_of_the_llama4_checkpoints():
    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0,
        "high_freq_factor": 1.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    scaled, plain = tiny_llama4(rope_parameters=scaling, **TWO_LAYERS), tiny_llama4(**TWO_LAYERS)
    compiled = pagebinder.compile_model(scaled, CompileConfig(executable="eager"))
    expected = logits(scaled, tokens(77))
    assert (expected - logits(plain, tokens(77))).abs().max() > 0.1
    got = compiled.run_level("fused", tokens(77))
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_without_its_leaf_llama4_counts_rows_which_are_positions(monkeypatch):
    monkeypatch.setattr(capture_module, "LEAVES", ())
    model = tiny_llama4(**TWO_LAYERS)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", verify="sample"))
    assert next(p for p in compiled.report.passes if p.name == "recognise_row_positions").matches
    got = compiled.run_level("fused", tokens(77))
    torch.testing.assert_close(got, logits(model, tokens(77)), atol=TOLERANCE, rtol=TOLERANCE)


def test_without_temperature_no_leaf_is_needed(monkeypatch):
    monkeypatch.setattr(capture_module, "LEAVES", ())
    model = tiny_llama4(attn_temperature_tuning=False, **TWO_LAYERS)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    expected = logits(model, tokens(77))
    torch.testing.assert_close(
        compiled.run_level("fused", tokens(77)), expected, atol=TOLERANCE, rtol=TOLERANCE
    )


def test_experts_of_llama4_are_served():
    model = scale_weights(tiny_llama4(moe_layers=[1], **TWO_LAYERS))
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    got = compiled.run_level("fused", tokens(50))
    torch.testing.assert_close(got, logits(model, tokens(50)), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_chunk_that_the_length_never_leaves_is_full_attention():
    model = scale_weights(tiny_llama4(64, **TWO_LAYERS))
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", max_model_len=64))
    assert {s.kind for s in compiled.states} == {"full_attention"}
    got = compiled.run_level("fused", tokens(64))
    torch.testing.assert_close(got, logits(model, tokens(64)), atol=TOLERANCE, rtol=TOLERANCE)
