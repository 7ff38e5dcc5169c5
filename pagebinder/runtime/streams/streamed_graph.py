"""Runs a graph by its schedule: runs of launches of one stream are a part each, with events between them.

    part 0 main  norm, linears               record e0
    part 1 side  wait e0, compress, ...      record e1
    part 2 main  linears, q_norm_rope        ...
    part 3 main  wait e1, attention          values that part 1 read are dropped here

A part is a GraphModule with the views and sizes that its launches need, made again where several parts need them: the
host's work, for which no stream waits. Values inside a part are dropped by its own code; what another part reads, or
what the schedule holds, is kept here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from pagebinder.runtime.streams.branches import MAIN
from pagebinder.runtime.streams.launches import is_value, maker
from pagebinder.runtime.streams.schedule import START, Schedule
from pagebinder.runtime.streams.streams import StreamOrderError, Streams


@dataclass
class _Part:
    """Launches of one stream without an event between them. `inputs` and `outputs`: names of values.

    waits_for, records: numbers of events. released: streams that own its memory -> values to drop after the part.
    """

    stream: int
    run: Callable
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    waits_for: int | None = None
    records: int | None = None
    released: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def __call__(self, values: dict[str, object]) -> None:
        try:
            args = [values[name] for name in self.inputs]
        except KeyError as error:
            raise StreamOrderError(
                f"{error} is read before it was made, or after it was dropped, by the part that makes "
                f"{', '.join(self.outputs) or 'nothing'}"
            ) from None
        values.update(zip(self.outputs, self.run(*args), strict=True))


class StreamedGraph:
    """Called as the graph that it was made of: inputs in the same order, the same result.

    `one_by_one`: every launch is a part of its own, so that streams may be interleaved at each.
    """

    def __init__(
        self, gm: GraphModule, schedule: Schedule, streams: Streams, *, one_by_one: bool = False
    ) -> None:
        self.schedule, self._streams = schedule, streams
        self.input_names = tuple(n.name for n in gm.graph.nodes if n.op == "placeholder")
        self._readers: dict[Node, list[Node]] = {}
        for node, values in schedule.launches.values.items():
            for value in values:
                self._readers.setdefault(value, []).append(node)
        recorded = schedule.recorded
        self._events = {n: i for i, n in enumerate(n for n in (START, *schedule.order) if n in recorded)}
        self._parts = [self._part(gm, nodes) for nodes in self._runs(one_by_one)]
        output = next(n for n in gm.graph.nodes if n.op == "output")
        self._result, self._result_inputs = _part_module(gm, (), output.args[0])

    def __call__(self, *args: torch.Tensor):
        values: dict[str, object] = dict(zip(self.input_names, args, strict=True))
        with self._streams.run(values) as run:
            if START in self._events:
                run.record(MAIN, self._events[START])
            for part in self._parts:
                if part.waits_for is not None:
                    run.wait(part.stream, part.waits_for)
                run.launch(part.stream, functools.partial(part, values))
                if part.records is not None:
                    run.record(part.stream, part.records)
                for owners, name in part.released:
                    run.drop(owners, name)
            if self.schedule.joined is not None:
                run.wait(MAIN, self._events[self.schedule.joined])
        return self._result(*(values[name] for name in self._result_inputs))

    def _runs(self, one_by_one: bool) -> list[list[Node]]:
        """The host's order, cut before a wait, behind a recorded event, and where the stream changes."""
        schedule, runs = self.schedule, []
        for node in schedule.order:
            previous = runs[-1][-1] if runs else None
            goes_on = (
                previous is not None
                and not one_by_one
                and schedule.stream[previous] == schedule.stream[node]
                and node not in schedule.waits
                and previous not in self._events
            )
            if goes_on:
                runs[-1].append(node)
            else:
                runs.append([node])
        return runs

    def _part(self, gm: GraphModule, nodes: Sequence[Node]) -> _Part:
        schedule = self.schedule
        inside = set(nodes)
        dropped = {v for node in nodes for v in schedule.released.get(node, ())}
        outputs = [v for node in nodes for v in _values_of(node) if self._leaves(v, inside, dropped)]
        run, inputs = _part_module(gm, nodes, tuple(outputs))
        part = _Part(schedule.stream[nodes[0]], run, inputs, tuple(v.name for v in outputs))
        if nodes[0] in schedule.waits:
            part.waits_for = self._events[schedule.waits[nodes[0]]]
        part.records = self._events.get(nodes[-1])
        earlier = sorted((v for v in dropped if maker(v) not in inside), key=str)
        part.released = [(self._owners(value), value.name) for value in earlier]
        return part

    def _leaves(self, value: Node, inside: set[Node], dropped: set[Node]) -> bool:
        """Whether a value made in a part is needed behind it: read there, returned, or held until a join."""
        launches = self.schedule.launches
        if value in launches.results or (self._is_held(value) and value not in dropped):
            return True
        return not inside.issuperset(self._readers.get(value, ()))

    def _is_held(self, value: Node) -> bool:
        return value in self.schedule.held

    def _owners(self, value: Node) -> tuple[int, ...]:
        """Streams that allocated the memory in which a value may lie; none of what lies in an input."""
        stream = self.schedule.stream
        made_by = self.schedule.launches.storages[value]
        return tuple(sorted({stream[node] for node in made_by if node in stream}))


def _part_module(gm: GraphModule, nodes: Sequence[Node], results) -> tuple[GraphModule, tuple[str, ...]]:
    """Launches in a graph of their own, with the views and sizes that they and the results need; it returns copies of
    `results`, in whatever they are nested. Also the names of its inputs."""
    inside, graph, copies = set(nodes), Graph(), {}
    wanted: list[Node] = []
    torch.fx.node.map_arg(results, wanted.append)
    inputs = _needed([*nodes, *wanted], inside)
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copy(node: Node) -> Node:
        if node not in copies:
            for operand in node.all_input_nodes:
                copy(operand)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    for node in nodes:
        copy(node)
    graph.output(torch.fx.node.map_arg(results, copy))
    return GraphModule(gm, graph, class_name="Part"), tuple(node.name for node in inputs)


def _needed(nodes: Sequence[Node], inside: set[Node]) -> list[Node]:
    """Inputs of the graph and values made outside that nodes read, through views and sizes."""
    found, seen = {}, set()

    def visit(node: Node) -> None:
        if node in seen:
            return
        seen.add(node)
        if node.op == "placeholder" or (is_value(node) and maker(node) not in inside):
            found[node] = None
            return
        for operand in node.all_input_nodes:
            visit(operand)

    for node in nodes:
        visit(node)
    return list(found)


def _values_of(node: Node) -> list[Node]:
    """What a launch makes: its result, and the parts of it that are picked."""
    return [node, *(user for user in node.users if user.target is operator.getitem)]
