"""Who must run after whom: data and hazards of each kind, from schemas alone."""

from __future__ import annotations

import operator

import pytest
import torch

from pagebinder.runtime.streams import UnknownEffects, launch_order
from pagebinder.runtime.streams.launches import values_behind
from tests.runtime.streams.stream_graphs import SIZE, aten, by_name, forked, graph_of


def dependencies(gm) -> dict[str, dict[str, str]]:
    launches = launch_order(gm)
    return {n.name: {o.name: why for o, why in launches.before[n].items()} for n in launches.nodes}


def test_data_and_what_a_cache_carries():
    found = dependencies(graph_of(forked))
    assert found == {
        "fork": {},
        "a1": {"fork": "data"},
        "b1": {"fork": "data"},
        "b2": {"b1": "data"},
        "a2": {"a1": "data"},
        "join": {"a2": "data", "b2": "read after write"},
    }


def test_hazards_of_each_kind():
    def build(call, x, cache):
        early = call(aten.add.Tensor, cache, x, name="early")
        call(aten.copy_.default, cache, x, name="first")
        call(aten.copy_.default, cache, early, name="second")
        return call(aten.add.Tensor, cache, x, name="late")

    assert dependencies(graph_of(build)) == {
        "early": {},
        "first": {"early": "write after read"},
        "second": {"early": "data", "first": "write after write"},
        "late": {"second": "read after write"},
    }


def test_hazards_reach_through_views_and_results_in_place():
    def build(call, x, cache):
        row = call(aten.select.int, call(aten.view.default, cache, [SIZE, SIZE]), 0, 1)
        kept = call(aten.mul.Tensor, x, 2.0, name="kept")
        turned = call(aten.transpose.int, kept, 0, 1)
        read = call(aten.add.Tensor, turned, 1.0, name="read")
        changed = call(aten.sin_.default, kept, name="changed")
        call(aten.fill_.Scalar, row, 3.0, name="filled")
        last = call(aten.add.Tensor, turned, cache, name="last")
        return call(aten.add.Tensor, call(aten.add.Tensor, read, changed, name="sum"), last, name="end")

    assert dependencies(graph_of(build)) == {
        "kept": {},
        "read": {"kept": "data"},
        "changed": {"kept": "data", "read": "write after read"},
        "filled": {},
        "last": {"kept": "data", "changed": "read after write", "filled": "read after write"},
        "sum": {"read": "data", "changed": "data"},
        "end": {"sum": "data", "last": "data"},
    }


def test_what_launches_nothing_is_no_launch():
    def build(call, x, cache):
        size = call(aten.sym_size.int, x, 0)
        double = call(operator.mul, size, 1)
        parts = call(aten.split.Tensor, x, 2)
        view = call(aten.view.default, call(operator.getitem, parts, 0), [-1])
        maybe = call(aten.reshape.default, x, [-1], name="maybe")  # copies, or not
        best = call(aten.topk.default, maybe, double, name="best")
        picked = call(operator.getitem, best, 0, name="picked")
        return call(aten.add.Tensor, picked, call(aten.repeat.default, view, [2], name="twice"), name="sum")

    gm = graph_of(build)
    assert list(dependencies(gm)) == ["maybe", "best", "twice", "sum"]
    launches = launch_order(gm)
    named = by_name(launches)
    assert [v.name for v in launches.values[named["sum"]]] == ["picked", "twice"]
    # A copy or a view: it may lie in x, and it may be new.
    assert {n.name for n in launches.storages[named["maybe"]]} == {"x", "maybe"}
    assert values_behind(next(n for n in gm.graph.nodes if n.name == "x")) == []


def test_an_op_that_may_return_its_operand_shares_its_memory():
    """Dropout outside of training, for example, of which the schema says that the result is new."""

    def build(call, x, cache):
        same = call(aten.dropout.default, cache, 0.5, False, name="same")
        call(aten.copy_.default, cache, x, name="write")
        return call(aten.add.Tensor, same, x, name="read")

    assert dependencies(graph_of(build))["read"] == {"same": "data", "write": "read after write"}


def test_ops_of_ours_write_what_their_schema_says():
    import pagebinder.custom_ops  # noqa: F401

    def build(call, rows, cache, slots):
        call(torch.ops.pagebinder.latent_cache_write.default, rows, cache, slots, name="write")
        return call(aten.add.Tensor, cache, 1.0, name="read")

    found = dependencies(graph_of(build, ("rows", "cache", "slots")))
    assert found == {"write": {}, "read": {"write": "read after write"}}


def test_what_is_no_op_is_refused():
    def build(call, x, cache):
        node = call(torch.special.expit, x, name="python")
        node.meta["val"] = torch.empty(1)
        return node

    with pytest.raises(UnknownEffects, match="python calls .* no op with a schema"):
        launch_order(graph_of(build))


def test_a_write_to_a_weight_is_refused():
    gm = graph_of(forked)
    gm.register_buffer("table", torch.zeros(SIZE, SIZE))
    join = next(n for n in gm.graph.nodes if n.name == "join")
    with gm.graph.inserting_before(join):
        gm.graph.call_function(aten.sin_.default, (gm.graph.get_attr("table"),))
    with pytest.raises(UnknownEffects, match="writes to a weight"):
        launch_order(gm)
