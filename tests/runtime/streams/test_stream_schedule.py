"""Events suffice and none can be spared: by a check of what happens before what, and by running in hostile orders."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from pagebinder.runtime.graphs.cpu_backend import Recorder
from pagebinder.runtime.streams import StreamedGraph, StreamOrderError, launch_order, make_schedule
from pagebinder.runtime.streams.branches import MAIN, SIDE
from pagebinder.runtime.streams.schedule import problems
from pagebinder.runtime.streams.simulated import SimulatedStreams
from tests.runtime.streams.stream_graphs import (
    SIZE,
    aten,
    by_name,
    forked,
    graph_of,
    planned,
    random_graph,
    run_plainly,
    same,
    simulated,
    square_inputs,
)

ORDERS = 6


def without_wait(schedule, node):
    """The schedule, one wait (None: the one at the end) left out."""
    if node is None:
        return dataclasses.replace(schedule, joined=None)
    return dataclasses.replace(schedule, waits={n: w for n, w in schedule.waits.items() if n is not node})


def wrong_for_some_seed(gm, schedule, inputs, expected) -> bool:
    run = simulated(gm, schedule)
    for _ in range(2 * ORDERS):
        try:
            if not same(run(inputs), expected):
                return True
        except StreamOrderError:
            return True
    return False


def random_schedule(seed: int):
    """A random graph, any half of which is on the side stream: what is right for that is right for every choice."""
    gm, draw = random_graph(seed), random.Random(seed)
    launches = launch_order(gm)
    return gm, make_schedule(launches, frozenset(n for n in launches.nodes if draw.random() < 0.5))


def test_the_schedule_of_a_fork():
    _, schedule = planned(graph_of(forked))
    named = by_name(schedule)
    assert [n.name for n in schedule.order] == ["fork", "b1", "b2", "a1", "a2", "join"]
    assert schedule.waits == {named["b1"]: named["fork"], named["join"]: named["b2"]}
    assert schedule.recorded == {named["fork"], named["b2"]} and schedule.joined is None
    # b1 reads what the fork made on the main stream: kept until that has waited for the side.
    assert schedule.held == {named["fork"]: named["join"]}
    assert set(schedule.released[named["b2"]]) == {named["b1"], named["b2"]}
    assert set(schedule.released[named["join"]]) == {named["fork"], named["a2"]}
    assert not problems(schedule)


def test_what_the_side_made_is_held_until_it_waits_again():
    def build(call, x, cache):
        for i in range(2):
            b = call(aten.cos.default, call(aten.sin.default, x), name=f"b{i}")
            a = call(aten.mul.Tensor, call(aten.add.Tensor, x, 1.0, name=f"a{i}"), 2.0)
            x = call(aten.add.Tensor, a, b, name=f"join{i}")
        return x

    launches = launch_order(graph_of(build))
    named = by_name(launches)
    side = {named["b0"], named["b1"], *launches.before[named["b0"]], *launches.before[named["b1"]]} - {
        named["join0"]
    }
    schedule = make_schedule(launches, frozenset(side))
    assert schedule.held[named["b0"]].name == "sin_default_1", "the side's first launch after the join"
    assert schedule.held[named["b1"]] is None, "to the end"
    assert not problems(schedule)


def test_every_order_gives_the_same_bits():
    gm = graph_of(forked)
    _, schedule = planned(gm)
    inputs, run = square_inputs(2), simulated(gm, schedule)
    assert all(same(run(inputs), run_plainly(gm, inputs)) for _ in range(ORDERS))


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_on_random_streams(seed):
    gm, schedule = random_schedule(seed)
    assert not problems(schedule)
    inputs = square_inputs(3)
    expected = run_plainly(gm, inputs)
    for one_by_one in (True, False):
        run = simulated(gm, schedule, one_by_one=one_by_one)
        assert all(same(run(inputs), expected) for _ in range(ORDERS))


@pytest.mark.parametrize("seed", range(40))
def test_no_wait_can_be_spared(seed):
    _, schedule = random_schedule(seed)
    removable = [*schedule.waits, *([None] if schedule.joined is not None else [])]
    assert removable
    for node in removable:
        assert problems(without_wait(schedule, node)), f"nothing needs the wait of {node}"


@pytest.mark.parametrize("missing", ["b1", "join"])
def test_a_missing_wait_shows_when_it_is_run(missing):
    """One is missed by what is read before it was made, the other by what a cache holds."""
    gm = graph_of(forked)
    _, schedule = planned(gm)
    inputs = square_inputs(2)
    broken = without_wait(schedule, by_name(schedule)[missing])
    assert any("may run before" in problem for problem in problems(broken))
    assert wrong_for_some_seed(gm, broken, inputs, run_plainly(gm, inputs))


def test_missing_waits_show_in_random_graphs():
    """Not each, as two writes may leave the same: nearly all."""
    caught = total = 0
    for seed in range(3):
        gm, schedule = random_schedule(seed)
        inputs = square_inputs(3)
        expected = run_plainly(gm, inputs)
        for node in schedule.waits:
            total += schedule.waits[node] is not None
            broken = without_wait(schedule, node)
            caught += schedule.waits[node] is not None and wrong_for_some_seed(gm, broken, inputs, expected)
    assert total > 15 and caught > 0.8 * total


def test_an_early_release_is_caught():
    gm = graph_of(forked)
    _, schedule = planned(gm)
    named = by_name(schedule)
    released = {n: tuple(v for v in values if v.name != "fork") for n, values in schedule.released.items()}
    broken = dataclasses.replace(schedule, released=released | {named["a1"]: (named["fork"],)})
    assert problems(broken) == ["a2 may be given the memory of fork, which b1 reads"]
    inputs = square_inputs(2)
    assert wrong_for_some_seed(gm, broken, inputs, run_plainly(gm, inputs))


def test_a_schedule_follows_from_its_graph_alone():
    for seed in range(5):
        texts = set()
        for _ in range(3):
            _, schedule = random_schedule(seed)
            texts.add(str((schedule.order, schedule.waits, schedule.joined, schedule.held)))
        assert len(texts) == 1


def test_parts_are_runs_of_one_stream():
    gm = graph_of(forked)
    _, schedule = planned(gm)
    parts = StreamedGraph(gm, schedule, SimulatedStreams())._parts
    assert [part.stream for part in parts] == [MAIN, SIDE, MAIN, MAIN]
    assert [part.outputs for part in parts] == [("fork",), (), ("a2",), ("join",)]
    assert [(part.waits_for, part.records) for part in parts] == [(None, 0), (0, 1), (None, None), (1, None)]


def test_a_run_that_fails_leaves_the_graph_usable():
    gm = graph_of(forked)
    _, schedule = planned(gm)
    streamed = StreamedGraph(gm, schedule, SimulatedStreams())
    good = square_inputs(2)
    with pytest.raises(RuntimeError):
        streamed(good[0], torch.zeros(3))
    cache = good[1].clone()
    assert torch.equal(streamed(good[0].clone(), cache), run_plainly(gm, good)[0])


def test_what_is_recorded_counts_the_memory_of_both_streams_in_the_hosts_order():
    """The fork is held until the join beside a1 and a2; b1 has the side's own memory. In any order of running."""
    gm = graph_of(forked)
    _, schedule = planned(gm)
    one = 4 * SIZE * SIZE
    for seed in range(ORDERS):
        streamed, inputs = (
            StreamedGraph(gm, schedule, SimulatedStreams(seed), one_by_one=True),
            square_inputs(2),
        )
        with torch.inference_mode(), Recorder() as recorder:
            result = streamed(*inputs)
        assert recorder.peaks((result,)) == {MAIN: 3 * one, SIDE: one}
