"""Two streams for one graph: what does not depend on each other runs side by side.

    gm --launch_order--> who must run after whom --find_branches--> main or side --make_schedule--> order, events
       --StreamedGraph--> runs, over CUDA's streams or, on a CPU, over simulated ones that try every order

`Overlap` does all of it for the graphs of one model.
"""

from pagebinder.runtime.streams.branches import StreamPlan, find_branches
from pagebinder.runtime.streams.costs import NodeCost, StreamRates
from pagebinder.runtime.streams.launches import Launches, UnknownEffects, launch_order
from pagebinder.runtime.streams.overlap import Overlap
from pagebinder.runtime.streams.schedule import Schedule, make_schedule
from pagebinder.runtime.streams.streamed_graph import StreamedGraph, StreamOrderError

__all__ = [
    "Launches",
    "NodeCost",
    "Overlap",
    "Schedule",
    "StreamOrderError",
    "StreamPlan",
    "StreamRates",
    "StreamedGraph",
    "UnknownEffects",
    "find_branches",
    "launch_order",
    "make_schedule",
]
