"""Per step: who shares a prefix, whether reading it once pays, and the graph's inputs that say so.

Serves graphs that ask for it (`CompileConfig(cascade=True)`), one decision per KV group: layers of a group share
their block table. Steps that share nothing cost a comparison of first blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.fx import GraphModule

from pagebinder.config import EngineConfig
from pagebinder.errors import ConfigError
from pagebinder.runtime.cascade_costs import CascadeCosts, CascadeShape, measure_rates
from pagebinder.runtime.device_copies import to_device
from pagebinder.runtime.kv import KVCacheGroup
from pagebinder.runtime.kv.rows import RowArray
from pagebinder.runtime.scheduler_output import SchedulerOutput
from pagebinder.runtime.shared_prefixes import (
    SharedPrefix,
    find_shared_prefixes,
    nothing_shared,
    order_shared_tokens,
)
from pagebinder.runtime.step_plan import StepPlanner

SHARED_LENS = "shared_lens_"


@dataclass
class CascadeStats:
    """`steps` that read a prefix together, `saved_tokens`: keys that were not read again in them, per KV group.
    `refused`: steps in which a shared prefix was read apart, by reason."""

    steps: int = 0
    saved_tokens: int = 0
    refused: Counter = field(default_factory=Counter)


class Cascade:
    """The shared prefixes of an engine's steps.

    Args:
        shapes: KV group -> a layer of it; the groups whose layers can read in parts. Empty: nothing to do.
        mode: "auto" by cost, "on" wherever a block is shared, "off".
    """

    def __init__(
        self, groups: tuple[KVCacheGroup, ...], tables: tuple[RowArray, ...], shapes: dict[int, CascadeShape],
        device: torch.device, *, mode: str,
    ) -> None:  # fmt: skip
        self.groups, self.tables, self.shapes, self.device, self.mode = groups, tables, shapes, device, mode
        self.stats = CascadeStats()
        self.costs: dict[int, CascadeCosts] = {}
        self._kept_sizes: tuple[int, ...] = ()
        self._kept: Mapping[str, torch.Tensor] = {}
        if mode == "auto":
            measured = {shape: measure_rates(shape, device) for shape in dict.fromkeys(shapes.values())}
            self.costs = {g: CascadeCosts(shape, measured[shape]) for g, shape in shapes.items()}

    def inputs(self, output: SchedulerOutput) -> Mapping[str, torch.Tensor]:
        """shared_lens_g, shared_leaders_g [R] and shared_tokens_g [T] of every group that can read in parts."""
        if not self.shapes:
            return {}
        refused: Counter = Counter()
        asked = self.mode != "off" and len(output.counts) > 1
        found = {g: self._prefixes(g, output, refused) if asked else [] for g in self.shapes}
        self.stats.refused.update(refused)
        if not any(found.values()):
            return self._nothing(len(output.counts), output.total_num_tokens)
        saved = sum(
            (len(rows) - 1) * num_blocks * self.groups[g].block_size
            for g, prefixes in found.items()
            for rows, num_blocks in prefixes
        )
        self.stats.steps += 1
        self.stats.saved_tokens += saved
        inputs: dict[str, torch.Tensor] = {}
        for g, prefixes in found.items():
            inputs |= self._of_group(g, prefixes, output)
        return inputs

    def _of_group(
        self, g: int, prefixes: list[SharedPrefix], output: SchedulerOutput
    ) -> dict[str, torch.Tensor]:
        lens, leaders = (np.zeros(len(output.counts), np.int32) for _ in range(2))
        tokens = np.empty(output.total_num_tokens, np.int32)
        for rows, num_blocks in prefixes:
            lens[rows], leaders[rows] = num_blocks * self.groups[g].block_size, rows[0]
        order_shared_tokens(lens, leaders, np.concatenate([[0], np.cumsum(output.counts)]), tokens)
        named = {SHARED_LENS: lens, "shared_leaders_": leaders, "shared_tokens_": tokens}
        return {f"{name}{g}": to_device(array, self.device) for name, array in named.items()}

    def _nothing(self, *sizes: int) -> Mapping[str, torch.Tensor]:
        """Inputs of a step without shared prefixes, kept for the next one of the same sizes."""
        if self._kept_sizes != sizes:
            self._kept_sizes = sizes
            self._kept = nothing_shared(max(self.shapes) + 1, *sizes, self.device)
        return self._kept

    def _prefixes(self, g: int, output: SchedulerOutput, refused: Counter) -> list[SharedPrefix]:
        group, counts, size = self.groups[g], output.counts, self.groups[g].block_size
        full_blocks = np.where(counts > 0, output.starts // size, 0)
        if group.spec.kind == "sliding_window":
            # Blocks that a window has left are given back: only requests that it still reaches to the start of.
            outgrown = output.starts + counts > group.spec.window
            if np.count_nonzero(outgrown & (full_blocks > 0)) > 1:
                refused["window"] = 1
            full_blocks = np.where(outgrown, 0, full_blocks)
        offered = 0

        def value(rows: np.ndarray, num_blocks: int) -> float:
            nonlocal offered
            offered += 1
            if self.mode == "on":
                return float((len(rows) - 1) * num_blocks)
            return self.costs[g].gain(counts[rows], num_blocks * size)

        found = find_shared_prefixes(self.tables[g].data, full_blocks, value)
        if offered and not found:
            refused["cost"] = 1
        return found


def cascade_of(graph: GraphModule | None, planner: StepPlanner, config: EngineConfig) -> Cascade:
    """An engine's cascade, for the graph that it runs. Raises ConfigError: cascade="on", and the graph has none."""
    shapes = {} if graph is None else cascaded_shapes(graph)
    if config.cascade == "on" and not shapes:
        raise ConfigError(
            'cascade="on": no layer of this model was compiled to read shared prefixes; use '
            "CompileConfig(cascade=True), and see explain() for the layers that cannot."
        )
    return Cascade(planner.groups, planner.tables, shapes, planner.device, mode=config.cascade)


def cascaded_shapes(graph: GraphModule) -> dict[int, CascadeShape]:
    """KV group -> the first layer of it that reads in parts."""
    shapes: dict[int, CascadeShape] = {}
    for node in graph.graph.nodes:
        if node.op != "placeholder" or not node.target.startswith(SHARED_LENS):
            continue
        attention = next(iter(node.users))
        q, cache = (operand.meta["val"] for operand in attention.args[:2])
        shapes[int(node.target.removeprefix(SHARED_LENS))] = CascadeShape(
            num_heads=int(q.shape[1]),
            num_kv_heads=int(cache.shape[1]),
            head_dim=int(q.shape[2]),
            head_dim_v=int(attention.kwargs["head_dim_v"]),
            dtype=str(q.dtype).removeprefix("torch."),
        )
    return shapes
