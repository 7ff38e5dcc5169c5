"""What a node costs on a GPU, well enough to say whether it pays to run two of them side by side.

    alone         max(bytes / rate of memory, flops / rate of compute, what the smallest kernel takes)
    side by side  the longer stream and its waits, but never less than all bytes, or all flops, at the GPU's rates:
                  two kernels that each fill the memory's bandwidth gain nothing from each other

The rates are those of a present data centre GPU, rounded: a decision should not change from one such GPU to another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeCost:
    """Seconds of one node: by itself, and what it takes of the memory's and of the multipliers' time."""

    seconds: float = 0.0
    memory_seconds: float = 0.0
    compute_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StreamRates:
    """flops and bytes a second; the time of the smallest kernel inside a captured graph; of a wait between streams;
    the gain below which a branch stays where it is: more than one smallest kernel, which estimates cannot promise."""

    flops: float = 500e12
    bytes: float = 3e12
    kernel_seconds: float = 3e-6
    wait_seconds: float = 1.5e-6
    least_gain_seconds: float = 4e-6

    def cost(self, flops: float, num_bytes: float) -> NodeCost:
        """Of a node that launches something."""
        memory, compute = num_bytes / self.bytes, flops / self.flops
        return NodeCost(max(memory, compute, self.kernel_seconds), memory, compute)

    @property
    def unknown(self) -> NodeCost:
        """Of a node that nobody can say anything about."""
        return NodeCost(self.kernel_seconds)


def least_seconds(costs: Iterable[NodeCost]) -> float:
    """What a set of nodes takes at least, in whatever order and on however many streams."""
    memory = compute = 0.0
    for cost in costs:
        memory += cost.memory_seconds
        compute += cost.compute_seconds
    return max(memory, compute)
