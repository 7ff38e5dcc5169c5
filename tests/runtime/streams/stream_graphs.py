"""Graphs for the tests of streams: made by hand, with hazards of each kind, and at random."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from pagebinder.runtime.streams import (
    NodeCost,
    Schedule,
    StreamedGraph,
    StreamRates,
    find_branches,
    launch_order,
    make_schedule,
)
from pagebinder.runtime.streams.simulated import SimulatedStreams

aten = torch.ops.aten
RATES = StreamRates()
KERNEL = NodeCost(10e-6)
SIZE = 4


def graph_of(build: Callable[..., object], inputs: Sequence[str] = ("x", "cache")) -> GraphModule:
    """`build(call, *inputs)` makes nodes by `call(op, *args, name=...)` and returns what the graph returns."""
    graph = Graph()
    nodes = [graph.placeholder(name) for name in inputs]

    def call(op, *args, name: str | None = None, **kwargs) -> Node:
        node = graph.call_function(op, args, kwargs)
        if name is not None:
            node.name = name
        return node

    graph.output(build(call, *nodes))
    return GraphModule(torch.nn.Module(), graph)


def forked(call, x, cache):
    """fork -> a1 -> a2 and fork -> b1 -> b2, which the join reads: b2 through the cache that it was written to."""
    fork = call(aten.relu.default, x, name="fork")
    a1 = call(aten.mul.Tensor, fork, 2.0, name="a1")
    b1 = call(aten.sub.Tensor, fork, 3.0, name="b1")
    call(aten.copy_.default, call(aten.view.default, cache, [SIZE, SIZE]), b1, name="b2")
    a2 = call(aten.add.Tensor, a1, 1.0, name="a2")
    return call(aten.add.Tensor, a2, cache, name="join")


def by_name(schedule_or_launches) -> dict[str, Node]:
    nodes = getattr(schedule_or_launches, "nodes", None) or schedule_or_launches.order
    return {node.name: node for node in nodes}


def planned(gm: GraphModule, cost: NodeCost = KERNEL, **costs: NodeCost):
    """The plan and the schedule of a graph whose launches cost the same, but for some."""
    launches = launch_order(gm)
    plan = find_branches(launches, {n: costs.get(n.name, cost) for n in launches.nodes}, RATES)
    return plan, make_schedule(launches, plan.side)


def run_plainly(gm: GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results and inputs afterwards, of the graph in its own order."""
    inputs = [t.clone() for t in inputs]
    with torch.inference_mode():
        results = gm(*inputs)
    return [t.clone() for t in (*_flat(results), *inputs)]


def simulated(
    gm: GraphModule, schedule: Schedule, *, one_by_one: bool = True
) -> Callable[..., list[torch.Tensor]]:
    """The same over simulated streams, each call in an order of its own. The calls raise StreamOrderError."""
    streamed = StreamedGraph(gm, schedule, SimulatedStreams(), one_by_one=one_by_one)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        inputs = [t.clone() for t in inputs]
        with torch.inference_mode():
            results = streamed(*inputs)
        return [t.clone() for t in (*_flat(results), *inputs)]

    return run


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def square_inputs(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(SIZE, SIZE, generator=generator) for _ in range(count)]


def random_graph(seed: int, num_nodes: int = 24) -> GraphModule:
    """Products, views, splits and writes in place, to inputs and to values, in random order over [4, 4] tensors."""
    draw = random.Random(seed)

    def build(call, *inputs):
        values = [*inputs]
        for _ in range(num_nodes):
            kind = draw.randrange(7)
            one, other = draw.choice(values), draw.choice(values)
            if kind <= 1:
                values.append(call(aten.sin.default, call(aten.add.Tensor, one, other)))
            elif kind == 2:
                values.append(call(aten.mul.Tensor, one, draw.random()))
            elif kind == 3:
                values.append(call(aten.transpose.int, one, 0, 1))
            elif kind == 4:
                parts = call(aten.topk.default, one, SIZE)
                values.append(call(operator.getitem, parts, 0))
            elif kind == 5:
                target = call(aten.view.default, draw.choice(inputs), [SIZE, SIZE])
                call(aten.copy_.default, target, call(aten.cos.default, one))
            else:
                values.append(call(aten.sin_.default, draw.choice(values)))
        return (values[-1], (call(aten.reshape.default, values[len(values) // 2], [-1]), inputs[0]))

    return graph_of(build, ("x", "y", "cache"))


def _flat(results) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_flatten(results)[0]
