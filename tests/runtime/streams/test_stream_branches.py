"""What goes to the side stream, and why nothing does."""

from __future__ import annotations

from pagebinder.runtime.streams import NodeCost
from tests.runtime.streams.stream_graphs import KERNEL, RATES, SIZE, aten, forked, graph_of, planned


def names(nodes) -> list[str]:
    return [node.name for node in nodes]


def test_the_shorter_branch_goes_to_the_side():
    plan, _ = planned(graph_of(forked), b2=NodeCost(4e-6))
    (region,) = plan.regions
    assert names(region.side) == ["b1", "b2"] and names(region.beside) == ["a1", "a2"]
    assert region.join.name == "join" and region.before == ()
    # 34 us one after the other; side by side the longer branch: the fork is waited for by the side alone.
    assert round(region.serial_seconds * 1e6, 3) == 34.0 and round(region.parallel_seconds * 1e6, 3) == 20.0
    assert plan.refused is None and round(plan.gain_seconds - region.gain_seconds, 9) == 0


def test_a_chain_has_no_branches():
    def build(call, x, cache):
        for _ in range(3):
            update = call(aten.mul.Tensor, call(aten.sin.default, x), 2.0)
            x = call(aten.add.Tensor, x, update)
        return x

    plan, schedule = planned(graph_of(build))
    assert (
        not plan.regions and not plan.side and "every op needs the result of the one before" in plan.refused
    )
    assert not schedule.waits and schedule.joined is None


def test_what_waits_would_cost_more_than_they_save_stays():
    plan, _ = planned(graph_of(forked), NodeCost(1e-6))
    assert not plan.side
    assert "1 place(s) where branches could run side by side, and none pays" in plan.refused
    assert "beside" in plan.refused


def test_branches_that_fill_the_memory_gain_nothing():
    plan, _ = planned(graph_of(forked), NodeCost(10e-6, memory_seconds=10e-6))
    assert not plan.side and "none pays" in plan.refused
    plan, _ = planned(graph_of(forked), NodeCost(10e-6, memory_seconds=5e-6))
    assert plan.side


def test_what_launches_nothing_is_no_branch():
    plan, _ = planned(graph_of(forked), b1=NodeCost(), b2=NodeCost())
    assert not plan.side and "every op needs the result of the one before" in plan.refused


def test_a_projection_that_both_read_stays_and_is_waited_for():
    """c reads p, which the main stream computes while b is on the side already: as V4's indexer reads q's latent."""

    def build(call, x, cache):
        fork = call(aten.relu.default, x, name="fork")
        b = call(aten.sin.default, fork, name="b")
        p = call(aten.cos.default, fork, name="p")
        q1 = call(aten.mul.Tensor, p, 2.0, name="q1")
        c = call(aten.add.Tensor, b, p, name="c")
        q2 = call(aten.add.Tensor, q1, 1.0, name="q2")
        return call(aten.add.Tensor, q2, c, name="join")

    plan, schedule = planned(graph_of(build))
    (region,) = plan.regions
    assert names(region.side) == ["b", "c"]
    assert (names(region.beside), names(region.before)) == (["q1", "q2"], ["p"])
    assert {n.name: w.name for n, w in schedule.waits.items()} == {"b": "fork", "c": "p", "join": "c"}


def test_layers_one_behind_the_other_are_forks_of_their_own():
    def build(call, x, cache):
        for _ in range(3):
            x = call(aten.add.Tensor, x, forked(call, x, call(aten.clone.default, cache)))
        return x

    gm = graph_of(lambda call, x, cache: build(lambda op, *a, name=None: call(op, *a), x, cache))
    plan, _ = planned(gm)
    assert len(plan.regions) == 3
    assert [names(r.side) for r in plan.regions] == [names(r.side) for r in planned(gm)[0].regions]


def test_the_end_of_a_graph_is_a_join():
    """As of a piece of a cut graph, whose results others read."""

    def build(call, x, cache):
        a = call(aten.cos.default, call(aten.sin.default, x, name="a1"), name="a2")
        b = call(aten.mul.Tensor, x, 2.0, name="b")
        return a, call(aten.view.default, b, [SIZE * SIZE])

    plan, schedule = planned(graph_of(build))
    (region,) = plan.regions
    assert region.join is None and names(region.side) == ["b"] and schedule.joined.name == "b"
    assert list(schedule.waits.values()) == [None], "the side begins when the caller's stream is there"


def test_many_branches():
    """More than all sets of which are tried."""

    def build(call, x, cache):
        branches = [call(aten.mul.Tensor, x, float(i), name=f"b{i}") for i in range(12)]
        return call(aten.cat.default, branches, name="join")

    plan, _ = planned(graph_of(build))
    assert len(plan.side) == 1 and plan.gain_seconds >= KERNEL.seconds - RATES.wait_seconds
