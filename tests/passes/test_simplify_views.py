"""Chains of views become the shortest that give the same tensor: ops left, memory, near misses, and random chains."""

from __future__ import annotations

import copy
import operator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.fx import GraphModule

from pagebinder.graph_tools import aten, calls, num_ops, val
from pagebinder.passes.simplify_views import simplify_views
from tests.graphs import assert_metadata_kept, captured, clone, count
from tests.graphs import run as run_captured
from tests.helpers import NIGHTLY
from tests.passes.view_chains import MEMORY, Chains, names, results, run, same_results

VIEW, RESHAPE, SELECT, UNSQUEEZE = (
    aten.view.default,
    aten.reshape.default,
    aten.select.int,
    aten.unsqueeze.default,
)
TRANSPOSE, PERMUTE, SLICE, EXPAND = (
    aten.transpose.int,
    aten.permute.default,
    aten.slice.Tensor,
    aten.expand.default,
)
FLATTEN, UNFLATTEN, SQUEEZE = aten.flatten.using_ints, aten.unflatten.int, aten.squeeze.dim
CONTIGUOUS, ALIAS, UNSAFE_VIEW = aten.contiguous.default, aten.alias.default, aten._unsafe_view.default
END = 2**63 - 1
OTHER_SIZES = ({"T": 1, "U": 3}, {"T": 2, "U": 1}, {"T": 5, "U": 6})


def simplified(gm: GraphModule):
    """The graph afterwards, and the result; for all sizes both graphs give the same parts of the same memory."""
    after = GraphModule(gm, copy.deepcopy(gm.graph))
    env = next(iter(gm.graph.nodes)).meta["val"].fake_mode.shape_env
    guards = len(env.guards)
    result = simplify_views(after)
    assert len(env.guards) == guards
    assert num_ops(after) <= num_ops(gm) and result.changed == bool(result.matches)
    for sizes in OTHER_SIZES:
        assert same_results(after, gm, **sizes)
    return after, result


def chain(base, *ops):
    """What is left of a chain on a base of these sizes (and order, and gap), and the result."""
    chains = Chains()
    end = chains.chain(chains.base(*base), *ops)
    after, result = simplified(chains.module(end))
    assert_metadata_kept(after, VIEW, SELECT, TRANSPOSE, PERMUTE)
    return names(results(after)[0]), result


ROWS = ([1, "T", 16],)
HEADS = (["T", 4, 4],)
APART = ([1, "T", 16], [0, 1, 2], 2)  # a gap behind every entry
SHORTENED = {
    "heads of queries": (ROWS, [(VIEW, [1, "T", -1, 4]), (SELECT, 0, 0)], ["view"]),
    "heads of values": (
        ROWS, [(VIEW, [1, "T", 4, 4]), (TRANSPOSE, 1, 2), (SELECT, 0, 0), (TRANSPOSE, 0, 1)], ["view"],
    ),
    "rows of heads": (HEADS, [(UNSQUEEZE, 0), (RESHAPE, [1, "T", -1])], ["view"]),
    "there and back": (ROWS, [(SELECT, 0, 0), (UNSQUEEZE, 0)], []),
    "slices of everything": (ROWS, [(SLICE, 1, 0, END), (SLICE, 2, None, None), (ALIAS,)], []),
    "flat and back": (ROWS, [(FLATTEN, 1), (UNFLATTEN, 1, [-1, 16])], []),
    "channels first and back": (HEADS, [(TRANSPOSE, 0, 1), (UNSQUEEZE, 0), (TRANSPOSE, 1, 2)], ["view"]),
    "a reshape that copies nothing": (ROWS, [(RESHAPE, [-1, 8])], ["view"]),
    "one of a tensor with gaps": (APART, [(RESHAPE, ["T", 4, 4])], ["view"]),
    "what is contiguous": (ROWS, [(VIEW, [-1, 16]), (CONTIGUOUS,), (UNSAFE_VIEW, [1, -1, 16])], []),
    "two transposes": (HEADS, [(UNSQUEEZE, 0), (TRANSPOSE, 2, 3), (SELECT, 0, 0), (TRANSPOSE, 0, 2)], ["permute"]),
    "two that are one": (HEADS, [(PERMUTE, [2, 0, 1]), (TRANSPOSE, 0, 1)], ["transpose"]),
    "a part that was moved": (ROWS, [(VIEW, [-1, 2, 8]), (TRANSPOSE, 0, 1), (SELECT, 0, 1)], ["view", "select"]),
    "a part from the end": (HEADS, [(PERMUTE, [1, 0, 2]), (ALIAS,), (SELECT, 0, -1)], ["select"]),
    "a part of the width": (ROWS, [(SLICE, 2, 4, 12), (UNSQUEEZE, 2), (SQUEEZE, 0), (SQUEEZE, 1)], ["slice", "view"]),
    "an expanded one": ((["T", 1],), [(EXPAND, [-1, 4]), (UNSQUEEZE, 0), (SELECT, 0, 0)], ["expand"]),
    "an expansion of nothing": (HEADS, [(EXPAND, ["T", 4, -1]), (SQUEEZE, 1)], []),
    "two sizes that steps differ in": ((["T", "U", 8],), [(UNSQUEEZE, 0), (RESHAPE, ["T", "U", 4, -1])], ["view"]),
    "rows of two such sizes": ((["T", "U", 8],), [(TRANSPOSE, 0, 1), (TRANSPOSE, 0, 1), (VIEW, [-1, 8])], ["view"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORTENED)
def test_a_chain_becomes_the_shortest(name):
    base, ops, left = SHORTENED[name]
    found, result = chain(base, *ops)
    assert found == left and result.changed
    assert all(m.pattern == "views" and m.module_path == "body" for m in result.matches)


KEPT = {
    "one view": (ROWS, [(VIEW, [-1, 16])]),
    "heads before tokens": (ROWS, [(VIEW, [1, "T", 4, 4]), (TRANSPOSE, 1, 2)]),
    "a part of the rows": (HEADS, [(SLICE, 1, 0, 2)]),
    "every second entry": (HEADS, [(SLICE, 2, 0, END, 2)]),
    "a reshape that copies": (HEADS, [(TRANSPOSE, 0, 1), (RESHAPE, [-1, 4])]),
    "a contiguous copy": (HEADS, [(TRANSPOSE, 0, 1), (CONTIGUOUS,)]),
    "a reshape that copies unless there is one token": (([4, "T", 4],), [(TRANSPOSE, 0, 1), (RESHAPE, [-1, 4])]),
    "a flat copy that is a view of every second entry if there is one token": (
        (["T", "T", "U"], [0, 2, 1], 2), [(FLATTEN, 0, -1), (CONTIGUOUS,)],
    ),
    "a dimension of one entry only in some steps": ((["T", 4],), [(SQUEEZE, 0)]),
    "another order": (([4, 4],), [(TRANSPOSE, 0, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_the_shortest_is_kept(name):
    base, ops = KEPT[name]
    found, result = chain(base, *ops)
    assert found == [op[0]._opname for op in ops]
    assert not result.matches and not result.refusals


def test_equal_views_of_one_base_become_one():
    chains = Chains()
    base = chains.base(["T", 16])
    first = chains.chain(base, (UNSQUEEZE, 0), (VIEW, [1, "T", 4, 4]), (TRANSPOSE, 1, 2))
    again = chains.chain(base, (VIEW, ["T", 4, 4]), (TRANSPOSE, 0, 1), (UNSQUEEZE, 0))
    part = chains.chain(again, (SELECT, 0, 0))
    after, result = simplified(chains.module(first, again, part))
    one, two, three = results(after)
    assert one is two and names(one) == ["view", "transpose"]
    assert len(list(calls(after.graph, TRANSPOSE))) == 2 and names(three) == ["view", "transpose"]
    assert "an equal view" in result.matches[-2].detail


def test_equal_parts_of_two_bases_stay_two():
    chains = Chains()
    ends = [
        chains.chain(chains.base(["T", 16]), (UNSQUEEZE, 0), (SELECT, 0, 0), (VIEW, [-1, 8]))
        for _ in range(2)
    ]
    after, _ = simplified(chains.module(*ends))
    one, two = results(after)
    assert one is not two and names(one) == names(two) == ["view"]


def test_equal_sizes_are_read_once():
    chains = Chains()
    base = chains.base(["T", "U", 4])
    sizes = [chains.call(aten.sym_size.int, base, dim) for dim in (0, 1)]
    end = chains.call(VIEW, base, [*sizes, 2, 2])
    after, result = simplified(chains.module(end))
    assert [m.pattern for m in result.matches] == ["size", "size"]
    assert len(list(calls(after.graph, aten.sym_size.int))) == 2


def test_a_size_that_comes_too_late_is_no_argument():
    """Neither size of the view can be left out, and the product of the second is computed behind it."""
    chains = Chains()
    x = chains.base(["T", "U", 2, 2])
    flat = chains.chain(x, (FLATTEN, 1, 2))
    product = chains.graph.call_function(operator.mul, (chains.sizes["U"], 2))
    product.meta["val"] = 2 * chains.sizes["U"].meta["val"]
    after, _ = simplified(chains.module(flat, chains.call(VIEW, x, ["T", product, 2])))
    assert [names(n) for n in results(after)] == [["flatten"], ["flatten"]]


def test_strides_of_inputs_are_not_those_of_the_trace():
    """A cache [B, 2, 4] may be a part of a larger one; what does not depend on its strides is still done."""
    chains = Chains()
    cache = chains.input("cache", val(chains.base([8, 2, 4])))
    flat = chains.chain(cache, (UNSQUEEZE, 0), (RESHAPE, [16, 4]))
    split = chains.chain(cache, (UNSQUEEZE, 0), (VIEW, [8, 2, 2, 2]))
    doubled = chains.chain(cache, (aten.mul.Tensor, 2.0), (UNSQUEEZE, 0), (VIEW, [16, 4]))
    gm = chains.module(flat, split, doubled)
    simplify_views(gm)
    assert [names(n) for n in results(gm)] == [
        ["unsqueeze", "reshape"], ["view"], ["mul", "unsqueeze", "view"],
    ]  # fmt: skip
    large = torch.arange(8 * 2 * 8.0).view(8, 2, 8)[..., :4]
    found = gm(torch.zeros(MEMORY), torch.zeros(6), torch.zeros(7), large)
    assert torch.equal(found[0], large.reshape(16, 4)) and torch.equal(found[1], large.view(8, 2, 2, 2))


def test_a_write_to_the_base_is_seen_through_the_view_that_is_left():
    chains = Chains()
    base = chains.base(["T", 16])
    early = chains.chain(base, (UNSQUEEZE, 0), (VIEW, [1, "T", 4, 4]), (SELECT, 0, 0))
    chains.call(aten.mul_.Tensor, base, 2.0)
    late = chains.chain(base, (UNSQUEEZE, 0), (VIEW, ["T", 4, 4]))
    after, _ = simplified(chains.module(early, late, chains.call(aten.neg.default, early)))
    assert len(set(results(after)[:2])) == 1


def test_of_a_captured_model():
    def body(x, positions):
        v = (x * 2).view(1, x.shape[1], 4, 4).transpose(1, 2)[0].transpose(0, 1)
        return v.exp().unsqueeze(0).reshape(1, x.shape[1], -1) * x

    before = captured(body)
    after = clone(before)
    result = simplify_views(after)
    assert count(after, TRANSPOSE) == 0 and count(after, VIEW) == 2 and len(result.matches) == 2
    assert_metadata_kept(after, VIEW, aten.exp.default)
    for num_tokens in (1, 2, 9):
        assert torch.equal(run_captured(before, num_tokens), run_captured(after, num_tokens))


@st.composite
def graphs(draw):
    """A base with random sizes, order and gaps, a tree of random views and reshapes of it, and which are results."""
    chains = Chains()
    sizes = draw(st.lists(st.sampled_from(["T", "T", "U", 1, 2, 3, 4]), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes)))) if draw(st.booleans()) else None
    nodes = [chains.base(sizes, order, draw(st.sampled_from([1, 1, 2])))]
    for _ in range(draw(st.integers(2, 7))):
        x = nodes[-1] if draw(st.integers(0, 3)) else draw(st.sampled_from(nodes))
        call = draw(st.sampled_from(possible(x)))
        try:
            nodes.append(chains.call(call[0], x, *call[1:]))
        except (RuntimeError, ValueError, IndexError):  # torch has no such view
            continue
    kept = draw(st.lists(st.sampled_from(nodes), max_size=3))
    return chains, (nodes[-1], *kept)


def possible(x) -> list[tuple]:
    """Calls that a tensor allows, each with one choice of arguments or a few."""
    shape, rank = val(x).shape, val(x).dim()
    static = [d for d in range(rank) if isinstance(shape[d], int)]
    found = [
        (ALIAS,),
        (CONTIGUOUS,),
        (UNSQUEEZE, 0),
        (UNSQUEEZE, -1),
        (UNSQUEEZE, rank // 2),
        (FLATTEN, 0, -1),
    ]
    if rank > 1:
        found += [(TRANSPOSE, 0, -1), (TRANSPOSE, -2, -1), (TRANSPOSE, 0, 1), (PERMUTE, [*range(1, rank), 0])]
        found += [(FLATTEN, 0, 1), (FLATTEN, rank - 2, rank - 1)]
    for d in range(rank):
        found += [(SLICE, d, 0, END)]
    for d in static:
        found += [
            (SQUEEZE, d),
            (SELECT, d, 0),
            (SELECT, d, -1),
            (SLICE, d, shape[d] // 2, END),
            (SLICE, d, 0, END, 2),
        ]
        if shape[d] == 1:
            found.append((EXPAND, [3 if d == i else -1 for i in range(rank)]))
        if shape[d] in (4, 6):
            found += [(UNFLATTEN, d, [2, -1]), (UNFLATTEN, d, [1, -1, 2])]
    if len(static) >= rank - 1 and rank and all(shape[d] for d in static):
        inner = [shape[d] for d in static]
        for op in (VIEW, RESHAPE):
            found += [(op, [-1, *inner]), (op, [*inner, -1]), (op, [1, -1, *reversed(inner)]), (op, [-1])]
    return found


def test_a_graph_holds_for_the_sizes_that_it_was_captured_for():
    """Torch takes this view only where T is 6, as one of its guards says; with 1 it would run, too."""
    chains = Chains()
    assert chains.hold_for(T=1) and chains.hold_for(U=3)
    chains.chain(chains.base(("T", 1, 2, 3)), (UNSQUEEZE, 0), (VIEW, [1, 1, 2, 3, -1]))
    assert chains.hold_for() and chains.hold_for(U=3) and not chains.hold_for(T=1)


@settings(max_examples=60 if NIGHTLY else 20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_random_chains_give_the_same_memory(made):
    chains, ends = made
    gm = chains.module(*ends)
    after = GraphModule(gm, copy.deepcopy(gm.graph))
    before_pass = len(chains.env.guards)
    simplify_views(after)
    assert len(chains.env.guards) == before_pass and num_ops(after) <= num_ops(gm)
    for old, new in zip(results(gm), results(after), strict=True):
        assert len(names(new)) <= len(names(old))
    for sizes in OTHER_SIZES:
        if not chains.hold_for(**sizes):
            continue
        try:
            run(gm, torch.zeros(MEMORY), **sizes)
        except RuntimeError:  # what was captured holds for other sizes only
            continue
        assert same_results(after, gm, **sizes)
