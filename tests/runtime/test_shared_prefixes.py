"""Groups of requests with common leading blocks, and what the cost model makes of them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.runtime.cascade_costs import CascadeCosts, CascadeRates, CascadeShape, measure_rates
from pagebinder.runtime.shared_prefixes import (
    find_shared_prefixes,
    nothing_shared,
    order_shared_tokens,
)

SHAPE = CascadeShape(num_heads=8, num_kv_heads=2, head_dim=64, head_dim_v=64, dtype="bfloat16")
RATES = CascadeRates(read_near=1e-7, read_far=3e-7, tile=9e-8, row=1e-9)


def saved(rows, num_blocks):
    return (len(rows) - 1) * num_blocks


def groups_of(table, full_blocks=None, value=saved):
    table = np.array(table, np.int32)
    full = np.full(len(table), table.shape[1]) if full_blocks is None else np.array(full_blocks)
    return [(group.rows.tolist(), group.num_blocks) for group in find_shared_prefixes(table, full, value)]


def test_the_example_of_the_docstring():
    table = [[7, 8, 3, 5], [7, 8, 3, 6], [9, 4, 0, 0], [7, 8, 2, 0]]
    full = [4, 4, 2, 3]
    assert groups_of(table, full) == [([0, 1, 3], 2)]
    assert groups_of(table, full, lambda rows, n: saved(rows, n) - 2 * (n < 3)) == [([0, 1], 3)]


def test_only_full_blocks_count_and_null_blocks_do_not():
    assert groups_of([[5, 6], [5, 6]], [1, 2]) == [([0, 1], 1)]
    assert groups_of([[0, 6], [0, 6], [3, 4]], [0, 0, 2]) == []
    assert groups_of([[1, 2], [3, 4]]) == []
    assert groups_of([[1, 2]]) == []


def test_nested_and_separate_groups():
    """Pairs that share more beat what all have in common; other prefixes are groups of their own."""
    deep = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 9, 8, 7], [1, 9, 8, 7], [5, 6, 0, 0], [5, 6, 1, 0]]
    assert groups_of(deep) == [([0, 1], 4), ([2, 3], 4), ([4, 5], 2)]
    assert groups_of(deep, value=lambda rows, n: -1.0) == []


@st.composite
def tables(draw):
    """Rows that branch off one another, with block ids that no two branches have in common."""
    ids, rows = itertools.count(1), []
    for _ in range(draw(st.integers(2, 8))):
        keep = draw(st.integers(0, 5)) if rows else 0
        base = draw(st.sampled_from(rows))[:keep] if rows else []
        rows.append(base + [next(ids) for _ in range(5 - len(base))])
    return rows, [draw(st.integers(0, 5)) for _ in rows]


@settings(deadline=None, max_examples=60)
@given(tables())
def test_groups_are_worth_most_and_disjoint(case):
    rows, full = case
    found = groups_of(rows, full)
    members = list(itertools.chain(*(r for r, _ in found)))
    assert len(members) == len(set(members))
    for of, count in found:
        assert len({tuple(rows[r][:count]) for r in of}) == 1 and min(full[r] for r in of) >= count > 0
    assert sum(saved(*group) for group in found) == most_saved(rows, full)


def most_saved(rows, full, among=None, depth=0):
    """By trying every node of the tree of prefixes."""
    among = list(range(len(rows))) if among is None else among
    total = 0
    deeper = [r for r in among if full[r] > depth]
    for block in {rows[r][depth] for r in deeper}:
        inside = [r for r in deeper if rows[r][depth] == block]
        total += max(saved(inside, depth + 1), most_saved(rows, full, inside, depth + 1))
    return total


def test_tokens_stand_leader_by_leader():
    out = np.empty(8, np.int32)
    lens, leaders = np.array([4, 0, 8, 4, 8, 8]), np.array([0, 0, 2, 0, 2, 2])
    order_shared_tokens(lens, leaders, np.array([0, 1, 2, 3, 5, 5, 6]), out)
    assert out.tolist() == [0, 3, 4, 2, 5, -1, -1, -1]
    order_shared_tokens(lens * 0, leaders, np.arange(7), out)
    assert (out == -1).all()
    assert nothing_shared(2, 3, 5, "cpu")["shared_tokens_1"].tolist() == [-1] * 5


def test_costs_rise_with_what_is_saved():
    costs, ones = CascadeCosts(SHAPE, RATES), np.ones(8, np.int64)
    gains = [costs.gain(ones[:n], keys) for n, keys in ((2, 64), (2, 8192), (4, 8192), (8, 8192), (8, 65536))]
    assert gains[0] == 0 < gains[1] < gains[2] < gains[3] < gains[4]
    assert 1 < costs.predicted_ratio(ones, 1024, 4096) < costs.predicted_ratio(ones, 65536, 64) < 8


def test_prefills_gain_little():
    """Chunks of prompts are on tiles anyway, each key is read for many rows."""
    costs = CascadeCosts(SHAPE, RATES)
    assert costs.gain(np.array([512, 512]), 8192) == 0
    assert costs.gain(np.array([1, 1, 1, 0]), 8192) == costs.gain(np.array([1, 1, 1]), 8192) > 0


def test_slow_tiles_are_not_used():
    slow = CascadeCosts(SHAPE, CascadeRates(read_near=1e-7, read_far=3e-7, tile=1e-5, row=1e-9))
    assert slow.gain(np.ones(8, np.int64), 8192) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rates_are_measured(dtype):
    shape = CascadeShape(num_heads=4, num_kv_heads=2, head_dim=64, head_dim_v=64, dtype=dtype)
    rates = measure_rates(shape, torch.device("cpu"))
    assert min(rates.read_near, rates.read_far) > 0 and min(rates.tile, rates.row) >= 0
