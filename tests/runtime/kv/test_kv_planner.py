"""Specs and plans: sizes, formulas, grouping, layout, waste."""

import ast
import dataclasses
from pathlib import Path

import pytest
import sympy

import pagebinder.runtime.kv as kv_package
from pagebinder.custom_ops import layer_state
from pagebinder.custom_ops.layer_state import AttentionState, LayerState
from pagebinder.errors import ConfigError, UnsupportedLayerError
from pagebinder.runtime.kv import (
    FullAttentionSpec,
    KernelConstraints,
    KVCacheGroup,
    SlidingWindowSpec,
    plan_kv_cache,
    spec_from_state,
    specs,
)
from pagebinder.runtime.kv.planner import choose_block_size


def state(index, window=None, heads=2, dim=8, dtype="float16", layer=None):
    return AttentionState(
        layer=layer or f"L{index}", index=index, dtype=dtype, num_kv_heads=heads, head_dim=dim,
        head_dim_v=dim, window=window,
    )  # fmt: skip


def states(num_full, num_window, window=64, **window_options):
    full = [state(i + 1) for i in range(num_full)]
    return full + [state(num_full + i + 1, window, **window_options) for i in range(num_window)]


def layer_names(plan):
    return [group.layers for group in plan.groups]


def test_symbols_are_those_of_layer_states():
    assert specs.TOKENS == layer_state.TOKENS
    assert specs.BLOCK_SIZE == layer_state.BLOCK_SIZE


def test_no_torch_and_nothing_that_loads_it():
    runtime = Path(kv_package.__file__).parents[1]
    files = [*(runtime / "kv").glob("*.py"), runtime / "request.py", runtime / "scheduler.py"]
    for file in files:
        for node in ast.parse(file.read_text()).body:  # module level; type checking blocks lie deeper
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.startswith(("torch", "pagebinder.custom_ops")) for n in names), file


@pytest.mark.parametrize(
    ("heads", "dims", "bytes_per_token"),
    [(32, (128, 128), 16_384), (8, (128, 128), 4_096), (1, (128, 128), 512), (1, (512, 0), 1_024)],
)
def test_published_bytes_per_token(heads, dims, bytes_per_token):
    full = AttentionState(
        layer="x", index=0, dtype="bfloat16", num_kv_heads=heads, head_dim=dims[0], head_dim_v=dims[1]
    )
    spec = spec_from_state(full, 16, 1024)
    assert spec.page_size_bytes == 16 * bytes_per_token


def test_blocks_per_request_follow_the_table():
    full = spec_from_state(state(0), 16, 1000)
    window = spec_from_state(state(0, window=100), 16, 1000)
    assert full.max_blocks_per_request(1000, 64) == 63
    assert window.max_blocks_per_request(1000, 64) == 11 + 1  # cdiv(99 + 64, 16) + 1
    assert window.max_blocks_per_request(1000, 10**6) == 63 + 1


def test_formulas_round_up_to_blocks():
    T, B = specs.TOKENS, specs.BLOCK_SIZE
    full = spec_from_state(state(0), 16, 1000)
    window = spec_from_state(state(0, window=100), 16, 1000)
    assert full.request_bytes_formula == 64 * B * sympy.ceiling(T / B)
    assert full.request_bytes_formula.subs({T: 17, B: 16}) == 64 * 32
    assert window.request_bytes_formula.subs({T: 17, B: 16}) == 64 * 32
    assert window.request_bytes_formula.subs({T: 900, B: 16}) == 64 * 16 * 8  # cdiv(99, 16) + 1 blocks


def test_a_window_that_no_request_outgrows_is_full_attention():
    assert type(spec_from_state(state(0, window=128), 16, 128)) is FullAttentionSpec
    assert type(spec_from_state(state(0, window=127), 16, 128)) is SlidingWindowSpec


def test_specs_are_frozen_and_unknown_states_are_refused_by_name():
    spec = spec_from_state(state(0), 16, 128)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block_size = 8

    class Strange(LayerState):
        kind = "strange"

    with pytest.raises(UnsupportedLayerError, match=r"'model\.x'.*strange.*full_attention"):
        spec_from_state(Strange(layer="model.x", index=0, dtype="float16"), 16, 128)


def test_a_group_has_one_table():
    full, window = spec_from_state(state(0), 16, 128), spec_from_state(state(0, window=9), 16, 128)
    with pytest.raises(AssertionError):
        KVCacheGroup(full, ("a", "b"), (full, window))


def test_one_kind_is_one_group_side_by_side_even_with_different_pages():
    plan = plan_kv_cache([state(0), state(1, heads=4), state(2)], block_size=16, max_model_len=128)
    page = 16 * 2 * 16 * 2
    assert layer_names(plan) == [("L0", "L1", "L2")]
    assert [(p.offset_bytes, p.page_bytes, p.slot) for p in plan.layers] == [
        (0, page, 0),
        (page, 2 * page, 1),
        (3 * page, page, 2),
    ]
    assert plan.bytes_per_block == 4 * page
    assert plan.padding_bytes_per_block == (0,)
    assert plan.bytes_per_token == 4 * page / 16


@pytest.mark.parametrize(
    ("num_full", "num_window", "expected"),
    [
        (2, 4, [(1, 2), (3, 5), (4, 6)]),
        (3, 7, [(1, 2, 3), (4, 7, 10), (5, 8), (6, 9)]),
        (6, 5, [(1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11)]),
    ],
)
def test_uniform_page_grouping_examples(num_full, num_window, expected):
    plan = plan_kv_cache(states(num_full, num_window), block_size=16, max_model_len=1024)
    assert layer_names(plan) == [tuple(f"L{i}" for i in group) for group in expected]
    page = 1024
    widest = max(len(group) for group in expected)
    assert plan.bytes_per_block == widest * page
    assert plan.padding_bytes_per_block == tuple((widest - len(group)) * page for group in expected)


def test_growing_kinds_come_first_and_pages_keep_the_order_of_the_states():
    plan = plan_kv_cache([state(1, 64), state(2), state(3, 64), state(4)], block_size=16, max_model_len=1024)
    assert layer_names(plan) == [("L2", "L4"), ("L1", "L3")]
    assert [(p.layer, p.group, p.slot) for p in plan.layers] == [
        ("L1", 1, 0), ("L2", 0, 0), ("L3", 1, 1), ("L4", 0, 1),
    ]  # fmt: skip


def test_windows_of_different_width_are_different_groups():
    plan = plan_kv_cache([state(1, 32), state(2, 64)], block_size=16, max_model_len=1024)
    assert layer_names(plan) == [("L1",), ("L2",)]
    assert plan.bytes_per_token == 0
    assert plan.fixed_bytes_per_request == 1024 * ((2 + 1) + (4 + 1))


def test_different_page_sizes_share_one_pool_without_waste_where_they_fit():
    """Two layers of 1,024 bytes a page and two of 512: a block holds one of the former or both of the latter."""
    plan = plan_kv_cache(states(2, 2, heads=1), block_size=16, max_model_len=1024)
    assert layer_names(plan) == [("L1",), ("L2",), ("L3", "L4")]
    assert plan.bytes_per_block == 1024
    assert plan.padding_bytes_per_block == (0, 0, 0)


def test_different_page_sizes_share_one_pool_and_the_waste_is_stated():
    few = KernelConstraints(max_groups=2)
    plan = plan_kv_cache(states(2, 2, heads=1), block_size=16, max_model_len=1024, constraints=few)
    assert plan.bytes_per_block == 2 * 1024
    assert plan.padding_bytes_per_block == (0, 1024)
    text = "\n".join(plan.describe())
    assert (
        "group 1: 1,024 bytes of each block stay empty, because group 0 (full_attention) needs 2,048" in text
    )
    assert "50.0" in text


def test_waste_adds_up():
    plan = plan_kv_cache(states(3, 7, window=64), block_size=16, max_model_len=1000)
    for tokens in (1, 16, 63, 64, 65, 700, 1000):
        waste = plan.waste(tokens)
        raw = sum(s.formula.subs(specs.TOKENS, tokens) for s in states(3, 7, window=64))
        assert waste.held_bytes == plan.request_bytes_formula.subs(specs.TOKENS, tokens)
        assert waste.held_bytes - waste.padding_bytes - waste.rounding_bytes == raw
        assert waste.padding_bytes >= 0 and waste.rounding_bytes >= 0
    assert plan.waste().num_tokens == 1000
    assert plan_kv_cache([state(0)], max_model_len=64).waste().percent == 0.0


def test_sizing_the_pool():
    plan = plan_kv_cache(states(2, 2, window=64), block_size=8, max_model_len=100)
    assert plan.num_blocks_for(plan.bytes_per_block * 10 + 5) == 10
    assert plan.min_blocks(100, 16) == 1 + 13 + (10 + 1)  # cdiv(63 + 16, 8) + 1
    assert plan.max_concurrency(49, 100, 16) == 2.0


def test_bad_arguments_and_repeated_paths():
    with pytest.raises(ConfigError):
        plan_kv_cache([state(0)], block_size=0, max_model_len=128)
    with pytest.raises(ConfigError, match="no layer"):
        plan_kv_cache([], max_model_len=128)
    plan = plan_kv_cache([state(0, layer="shared"), state(1, layer="shared")], max_model_len=128)
    assert layer_names(plan) == [("shared#0", "shared#1")]


def sized(num_kv_heads=8, head_dim=128, dtype="bfloat16", window=None):
    return AttentionState(
        layer=f"L{head_dim}{dtype}{window}", index=0, dtype=dtype, num_kv_heads=num_kv_heads,
        head_dim=head_dim, head_dim_v=head_dim, window=window,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([sized()], 64),  # 512 bytes a row: 64 tokens make a run of 32 KB
        ([sized(dtype="float32")], 32),
        ([sized(head_dim=256, dtype="float32")], 16),
        ([sized(head_dim=64)], 64),  # never more than 64
        ([sized(num_kv_heads=1)], 64),  # runs are per head, so their number does not matter
        ([sized(head_dim=256, dtype="float32"), sized(head_dim=64)], 64),  # the narrowest row decides
        ([sized(window=4096)], 64),
        ([sized(window=256)], 32),  # at most an eighth of the window
        ([sized(window=20)], 16),
        ([], 16),
    ],
)
def test_the_block_size_gives_long_runs_unless_a_window_is_short(states, expected):
    assert choose_block_size(states) == expected
