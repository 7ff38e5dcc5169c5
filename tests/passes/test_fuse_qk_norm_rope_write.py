"""Norm + RoPE + cache write in one op: what whole models get, that tokens stay, and near misses."""

from __future__ import annotations

import pytest
import torch

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.graph_tools import aten, calls, insert_call, is_call
from pagebinder.passes.fuse_qk_norm_rope_write import fuse_qk_norm_rope_write
from tests.graphs import clone, count
from tests.helpers import by_day, tiny_llama, tiny_qwen3
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import tiny_model

pytestmark = pytest.mark.usefixtures("captured_once")

OURS = torch.ops.pagebinder
MODELS = {"llama": (tiny_llama, ""), "qwen3": (tiny_qwen3, "cast_scale")}
FUSED = {"fuse_qk_norm_rope_write", "fuse_gated_linear", "merge_linears"}


@pytest.fixture(scope="module")
def paged():
    """name -> the paged graph of a tiny model."""
    return {
        name: pagebinder.compile_model(make(), CompileConfig(executable="eager", fusions=False)).graphs[
            "paged"
        ]
        for name, (make, _) in MODELS.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_fused(paged, name):
    gm = clone(paged[name])
    layers = count(gm, OURS.kv_cache_write.default)
    result = fuse_qk_norm_rope_write(gm)
    assert len(result.matches) == layers > 0 and not result.refusals
    assert count(gm, OURS.kv_cache_write.default, OURS.rope.default) == 0
    assert {n.kwargs.get("tail", "") for n in calls(gm.graph, OURS.qk_norm_rope_write.default)} == {
        MODELS[name][1]
    }
    for attention in calls(gm.graph, OURS.paged_attention.default):
        assert attention.args[0].target is OURS.qk_norm_rope_write.default


@pytest.fixture(scope="module")
def paged_codes():
    config = CompileConfig(executable="eager", fusions=False, kv_dtype="fp8_e4m3_per_head")
    return pagebinder.compile_model(tiny_qwen3(), config).graphs["paged"]


def test_writes_of_codes_are_fused_with_their_format_and_scales(paged_codes):
    gm = clone(paged_codes)
    writes = list(calls(gm.graph, OURS.quantized_kv_cache_write.default))
    expected = [(w.args[2:], w.kwargs["codes"]) for w in writes]
    result = fuse_qk_norm_rope_write(gm)
    assert len(result.matches) == len(writes) > 0 and not result.refusals
    assert count(gm, OURS.quantized_kv_cache_write.default, OURS.rope.default) == 0
    fused = list(calls(gm.graph, OURS.qk_norm_rope_quantized_write.default))
    assert [(n.args[7:], n.kwargs["codes"]) for n in fused] == expected
    for attention in calls(gm.graph, OURS.quantized_paged_attention.default):
        assert attention.args[0] in fused


def read_elsewhere(gm, write):
    insert_call(gm.graph, write, aten.sin.default, (write.args[0],))


def rounded_on_the_way(gm, write):
    rope = next(n for n in calls(gm.graph, OURS.rope.default))
    x = rope.args[0]
    for dtype in (torch.bfloat16, torch.float32):
        x = insert_call(gm.graph, rope, aten.to.dtype, (x, dtype))
    rope.replace_input_with(rope.args[0], x)


def scaled_keys(gm, write):
    write.replace_input_with(
        write.args[0], insert_call(gm.graph, write, aten.mul.Tensor, (write.args[0], 2.0))
    )


def other_angles(gm, write):
    rope = next(n for n in calls(gm.graph, OURS.rope.default))
    rope.args = (rope.args[0], rope.args[2], rope.args[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (read_elsewhere, "read elsewhere"),
        (scaled_keys, "not turned"),
        (other_angles, "different angles"),
        (rounded_on_the_way, "are rounded"),
    ],
)
def test_near_misses_are_refused(paged, change, reason):
    gm = clone(paged["llama"])
    writes = list(calls(gm.graph, OURS.kv_cache_write.default))
    change(gm, writes[0])
    result = fuse_qk_norm_rope_write(gm)
    assert len(result.matches) == len(writes) - 1
    assert reason in result.refusals[0].reason and result.refusals[0].module_path


# family -> channels of its tiny heads that turn, how many there are
PARTIAL = {"phi": (8, 16), "glm4_moe": (8, 16), "qwen3_5_text": (4, 16)}


def partial_graph(name):
    architecture = next((a for a in architectures("causal") if a.name == name), None)
    if architecture is None:
        pytest.skip(f"this release of transformers has no {name}")
    config = CompileConfig(executable="eager", fusions=False)
    return clone(pagebinder.compile_model(tiny_model(architecture), config).graphs["paged"])


@pytest.mark.parametrize("name", PARTIAL)
def test_heads_that_turn_in_part_are_fused(name):
    gm = partial_graph(name)
    layers = count(gm, OURS.kv_cache_write.default)
    result = fuse_qk_norm_rope_write(gm)
    assert len(result.matches) == layers > 0 and not result.refusals
    for node in calls(gm.graph, OURS.qk_norm_rope_write.default):
        q, cos = node.args[0].meta["val"], node.args[3].meta["val"]
        assert (cos.shape[-1], q.shape[-1]) == PARTIAL[name]


# family in bfloat16 -> options of the fused op; layers with a window alone turn in Cohere 2
NEIGHBOURS = {
    "glm4": {"style": "every_two"},  # half of the channels, in the model's dtype
    "ernie4_5": {"style": "every_two"},  # by angles in float32
    "cohere2": {"style": "every_two", "in_float32": True},
    "modernbert-decoder": {"style": "half", "in_float32": True},
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_and_what_is_computed_in_float32_are_fused(name):
    """Each rewrite is certified on the way; tokens are those without it."""
    architecture = next((a for a in architectures("causal") if a.name == name), None)
    if architecture is None:
        pytest.skip(f"this release of transformers has no {name}")
    model, tokens = tiny_model(architecture).bfloat16(), []
    for options in ({"verify": "full"}, {"fusions": False}):
        compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", **options))
        engine = compiled.engine(EngineConfig(num_kv_blocks=32))
        outputs = engine.generate(
            [[3, 1, 4, 1, 5, 9], list(range(40))], SamplingParams(max_tokens=8, temperature=0.0)
        )
        tokens.append([output.token_ids for output in outputs])
        nodes = compiled.graphs["fused"].graph.nodes
        fused = [n for n in nodes if "qk_norm_rope_write" in str(n.target)]
        assert all(dict(n.kwargs) == NEIGHBOURS[name] for n in fused) and bool(fused) == ("verify" in options)
    assert tokens[0] == tokens[1]


def parts_of_heads(gm):
    """(the slice that turns, the other one) of the first heads that turn in part."""
    joined = next(n for n in calls(gm.graph, aten.cat.default) if is_call(n.args[0][1], aten.slice.Tensor))
    turned, kept = joined.args[0]
    return next(n for n in turned.all_input_nodes if is_call(n, aten.slice.Tensor)), kept


def others_first(gm):
    _, kept = parts_of_heads(gm)
    kept.args = (*kept.args[:2], 0, 8)


def of_other_heads(gm):
    low, kept = parts_of_heads(gm)
    doubled = insert_call(gm.graph, kept, aten.mul.Tensor, (low.args[0], 2.0))
    kept.replace_input_with(low.args[0], doubled)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(others_first, "not the leading channels"), (of_other_heads, "not parts of the same heads")],
)
def test_other_parts_of_heads_are_refused(change, reason):
    gm = partial_graph("phi")
    change(gm)
    result = fuse_qk_norm_rope_write(gm)
    assert len(result.refusals) == 1 and reason in result.refusals[0].reason


def test_a_bf16_model_keeps_its_tokens_and_verifies():
    """With and without fusions, decodes the same greedy tokens; every pass is verified on the way."""
    model = tiny_qwen3().bfloat16()
    tokens = []
    for config in (
        CompileConfig(executable="eager", verify="full"),
        CompileConfig(executable="eager", fusions=False),
    ):
        compiled = pagebinder.compile_model(model, config)
        engine = compiled.engine(EngineConfig(num_kv_blocks=32))
        prompts = [[3, 1, 4, 1, 5, 9], list(range(40))]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0))
        tokens.append([output.token_ids for output in outputs])
        matched = {result.name for result in compiled.report.passes if result.matches}
        assert matched & FUSED == (FUSED if config.fusions else set())
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("make", "kv_dtype"),
    by_day(
        [(tiny_qwen3, "fp8_e4m3"), (tiny_llama, "fp8_e5m2_per_head"), (tiny_llama, "int8")],
        [(tiny_qwen3, "fp8_e4m3")],
    ),
)
def test_models_over_codes_keep_their_tokens_and_verify(make, kv_dtype):
    """Decoding reads what prompts and earlier steps have written by the fused op."""
    tokens = []
    for options in ({"verify": "full", "max_model_len": 64}, {"fusions": False}):
        config = CompileConfig(executable="eager", kv_dtype=kv_dtype, block_size=16, **options)
        compiled = pagebinder.compile_model(make(), config)
        targets = [str(node.target) for node in compiled.graphs["fused"].graph.nodes]
        wanted = "qk_norm_rope_quantized_write" if config.fusions else "quantized_kv_cache_write"
        assert targets.count(f"pagebinder_cpu.{wanted}.default") == len(compiled.states)
        engine = compiled.engine(EngineConfig(num_kv_blocks=32))
        params = SamplingParams(max_tokens=8, temperature=0.0)
        outputs = engine.generate([[3, 1, 4, 1, 5, 9], list(range(40))], params)
        tokens.append([output.token_ids for output in outputs])
    assert tokens[0] == tokens[1]
