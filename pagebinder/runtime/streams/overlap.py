"""Two streams for the graphs of one model: its fused graph, and the pieces that it is cut into for capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.fx import GraphModule

from pagebinder.runtime.streams.branches import StreamPlan, find_branches
from pagebinder.runtime.streams.costs import NodeCost, StreamRates
from pagebinder.runtime.streams.launches import UnknownEffects, launch_order
from pagebinder.runtime.streams.schedule import Schedule, make_schedule
from pagebinder.runtime.streams.simulated import SimulatedStreams
from pagebinder.runtime.streams.streamed_graph import StreamedGraph
from pagebinder.runtime.streams.streams import CudaStreams, Streams


class Overlap:
    """How graphs use two streams. `costs`: by name of a node; what is missing costs the smallest kernel's time."""

    def __init__(
        self, streams: Streams, costs: Mapping[str, NodeCost], rates: StreamRates | None = None
    ) -> None:
        self.streams, self.costs, self.rates = streams, costs, rates or StreamRates()

    def simulated(self) -> Overlap:
        """The same without a GPU: values and memory are those of these streams."""
        streams = SimulatedStreams(one_by_one=self.streams.one_by_one)
        return Overlap(streams, self.costs, self.rates)

    def run_by(self, gm: GraphModule) -> Callable:
        """What runs a graph: on two streams where branches of it overlap, else the graph itself."""
        plan, schedule = plan_streams(gm, self.costs, self.rates)
        if not plan.regions:
            return gm
        return StreamedGraph(gm, schedule, self.streams, one_by_one=self.streams.one_by_one)


def plan_streams(
    gm: GraphModule, costs: Mapping[str, NodeCost], rates: StreamRates
) -> tuple[StreamPlan, Schedule | None]:
    """What of a graph goes to the side stream, and its schedule; None where the plan says why nothing can be said."""
    try:
        launches = launch_order(gm)
    except UnknownEffects as error:
        return StreamPlan((), frozenset(), 0.0, 0.0, str(error)), None
    plan = find_branches(launches, {n: costs.get(n.name, rates.unknown) for n in launches.nodes}, rates)
    return plan, make_schedule(launches, plan.side)


def streams_of(device: torch.device) -> Streams:
    """The streams of a device: simulated ones on a CPU."""
    return CudaStreams(device) if device.type == "cuda" else SimulatedStreams()
