"""What a compilation did, step by step: a copy of the graph after the capture and after every pass.

    captured -- recognise_rms_norm -- recognise_rope -- ... -- page_attention -- ... -- select_providers
             ^ step                ^ step              one Step holds the graph after it; weights are shared

The verifier, certificates and `bisect` all read it: what a pass did is the difference between two steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import GraphModule

from pagebinder.graph_tools import graph_module
from pagebinder.report import PassResult

KEEP = ("off", "sample", "full")
DECODER, ENCODER = "decoder", "encoder"


@dataclass(frozen=True)
class Step:
    """The graph after one pass. `result` is what the pass answered (None: it is no pass with an answer)."""

    chain: str
    level: str
    name: str
    graph: GraphModule
    result: PassResult | None = None


class Trail:
    """Steps of one compilation. `keep`: "full" keeps every step, "sample" the last of each level, "off" nothing.

    A step that changes numbers on purpose is kept by "sample" as well, with the one before it: what follows is
    compared with the graph that it left.
    """

    def __init__(self, keep: str) -> None:
        assert keep in KEEP
        self.keep = keep
        self.steps: list[Step] = []

    def add(
        self,
        level: str,
        name: str,
        gm: GraphModule,
        result: PassResult | None = None,
        *,
        chain: str = DECODER,
    ) -> None:
        """Keep a copy of `gm` as it is now."""
        if self.keep == "off":
            return
        if result is not None:
            result.level = level
        if self.keep == "sample" and not _changes_numbers(result):
            final = max((i for i, s in enumerate(self.steps) if _changes_numbers(s.result)), default=-1)
            self.steps = [
                s for i, s in enumerate(self.steps) if i <= final or (s.chain, s.level) != (chain, level)
            ]
            name = f"{level} level"
        snapshot = graph_module(gm, copy.deepcopy(gm.graph), type(gm).__name__)
        self.steps.append(Step(chain, level, name, snapshot, result))

    def after(self, level: str, *, chain: str = DECODER) -> Callable[[PassResult, GraphModule], None]:
        """A function for `run_passes(after=...)` that adds each pass."""
        return lambda result, gm: self.add(level, result.name, gm, result, chain=chain)

    def of(self, chain: str) -> list[Step]:
        return [step for step in self.steps if step.chain == chain]


def _changes_numbers(result: PassResult | None) -> bool:
    return result is not None and result.changes_numbers


def same_graph(a: GraphModule, b: GraphModule) -> bool:
    """Do two graphs call the same things on the same values, by name?"""
    return [_signature(n) for n in a.graph.nodes] == [_signature(n) for n in b.graph.nodes]


def _signature(node) -> tuple:
    return node.op, node.name, str(node.target), str(node.args), str(node.kwargs)
