"""The cheapest layout of all kinds, exactly.

    block   |<------------------------- S bytes ------------------------->|
    full    [ page ][ page ][ page ]                     3 layers, n = 1, B = 64
    window  [ page     ][ page     ][ page     ]         3 of 9 layers, n = 3, B = 128
    state   [ page               ][ page               ]

Kinds share two numbers only: the bytes S of a block, and the granularity A of prefix hits (a common multiple of the
checkpoint intervals). For fixed S and A, a kind's best block size does not depend on the other kinds, and for each of
its block sizes the fewest groups that fit are best. S is one of the page sums of some kind. So: for each A and all S
at once, the cost of each kind by its number of groups, joined over the kinds under the limit on groups; then the
least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pagebinder.runtime.kv.constraints import KernelConstraints
from pagebinder.runtime.kv.costs import Costs
from pagebinder.runtime.kv.kinds import LayerKind, finest_granularity
from pagebinder.runtime.kv.workload import Workload

# Costs are sums of floats in another order than their recomputation: this share of the bytes in use is noise.
SLACK = 1e-9


@dataclass(frozen=True)
class Layout:
    """Per kind (block size, number of groups); bytes of a block; per request, cost and bytes in use."""

    choices: tuple[tuple[int, int], ...]
    bytes_per_block: int
    granularity: int | None
    cost: float
    used_bytes: float
    preference: tuple[int, ...]

    @property
    def rank(self) -> tuple:
        """Cheapest first (floats apart from noise); of equals, fewer groups, finer resume points, `preference`."""
        share = round(self.cost / max(self.used_bytes, 1.0), 10)
        groups = sum(n for _, n in self.choices)
        return (share, groups, self.granularity or 0, self.preference)


def best_layouts(
    variants: list[list[LayerKind]], load: Workload, constraints: KernelConstraints
) -> list[tuple[list[LayerKind], Layout]]:
    """The cheapest layout and the next (if there is another) over all ways to sort layers into kinds."""
    max_groups = max(constraints.max_groups, min(map(len, variants)))
    found = []
    for kinds in variants:
        if len(kinds) <= max_groups:
            layouts = Search(kinds, load, constraints, max_groups).best_two()
            found += [(kinds, layout) for layout in layouts]
    return sorted(found, key=lambda pair: pair[1].rank)[:2]


class Search:
    """All layouts of one way to sort layers into kinds, for a workload."""

    def __init__(
        self, kinds: list[LayerKind], load: Workload, constraints: KernelConstraints, max_groups: int
    ) -> None:
        self.kinds, self.max_groups = kinds, max_groups
        self.costs, self.finest = Costs(kinds, load, constraints), finest_granularity(kinds)
        # needs[k][size][n - 1]: bytes that a block must hold.
        self.needs = [{b: kind.needs(b, self.max_groups) for b in kind.block_sizes} for kind in kinds]
        sums = {need for kind in self.needs for needs in kind.values() for need in needs}
        self.block_bytes = np.array(sorted(sums), dtype=np.int64)

    def best_two(self) -> list[Layout]:
        """The cheapest layout and the next, if there is another. Equal (block size, groups) is the same layout."""
        cells = [
            (float(cost), granularity, int(size))
            for granularity in self.costs.granularities
            for size, cost in zip(self.block_bytes, self._least_costs(granularity), strict=True)
            if np.isfinite(cost)
        ]
        found: dict[tuple, Layout] = {}
        for cost, granularity, size in sorted(cells, key=lambda cell: cell[0]):
            best = sorted(found.values(), key=lambda layout: layout.rank)[:2]
            if len(best) == 2 and cost > best[1].cost + SLACK * max(best[1].used_bytes, 1.0):
                break
            for choices in self._two_at(size, granularity):
                if choices not in found:
                    found[choices] = self.layout(choices)
        return sorted(found.values(), key=lambda layout: layout.rank)[:2]

    def layout(self, choices: tuple[tuple[int, int], ...]) -> Layout:
        """A layout from its choices alone."""
        size = max(self.needs[k][b][n - 1] for k, (b, n) in enumerate(choices))
        granularity = self._granularity(choices)
        cost = self.costs.total(choices, size, granularity)
        # Small blocks share more and round less; checkpoints are better few.
        preference = tuple(
            -b if kind.is_recurrent else b for kind, (b, _) in zip(self.kinds, choices, strict=True)
        )
        return Layout(choices, size, granularity, cost, sum(self.costs.ideal), preference)

    def _granularity(self, choices) -> int | None:
        if self.finest is None:
            return None
        intervals = [b for kind, (b, _) in zip(self.kinds, choices, strict=True) if kind.is_recurrent]
        return math.lcm(self.finest, *intervals)

    def _sizes(self, k: int, granularity: int | None) -> list[int]:
        """Block sizes of a kind at this granularity, which checkpoint intervals divide; the largest of them first."""
        kind = self.kinds[k]
        if not kind.is_recurrent:
            return list(kind.block_sizes)
        return [b for b in reversed(kind.block_sizes) if granularity is None or granularity % b == 0]

    def _least_costs(self, granularity: int | None) -> np.ndarray:
        """Cost of the best layout for each S [len(block_bytes)]; infinite where nothing fits."""
        joined = np.full((len(self.block_bytes), self.max_groups + 1), np.inf)
        joined[:, 0] = sum(self.costs.again(granularity)) - sum(self.costs.ideal)
        for k in range(len(self.kinds)):
            mine = self._costs_by_groups(k, granularity)
            after = np.full_like(joined, np.inf)
            for n in range(1, self.max_groups + 1):
                np.minimum(after[:, n:], joined[:, :-n] + mine[:, n : n + 1], out=after[:, n:])
            joined = after
        return joined.min(axis=1)

    def _costs_by_groups(self, k: int, granularity: int | None) -> np.ndarray:
        """Cost of one kind for each S and number of groups [len(block_bytes), max_groups + 1]."""
        costs = np.full((len(self.block_bytes), self.max_groups + 1), np.inf)
        rows = np.arange(len(self.block_bytes))
        for size in self._sizes(k, granularity):
            n = self._fewest_groups(k, size)
            fits = n <= self.max_groups
            blocks = self.costs.own_blocks(k, size, granularity)
            cost = n[fits] * (self.block_bytes[fits] * blocks + self.costs.toll)
            at = (rows[fits], n[fits])
            costs[at] = np.minimum(costs[at], cost)
        return costs

    def _fewest_groups(self, k: int, size: int) -> np.ndarray:
        """For each S, the least n whose groups fit; max_groups + 1 if none does."""
        needs = np.array(self.needs[k][size], dtype=np.int64)
        too_large = len(needs) - np.searchsorted(needs[::-1], self.block_bytes, side="right")
        return np.where(too_large == len(needs), self.max_groups + 1, too_large + 1)

    def _two_at(self, block_bytes: int, granularity: int | None) -> list[tuple[tuple[int, int], ...]]:
        """Choices of the two best layouts for one S and granularity."""
        best: dict[int, list[tuple[float, tuple]]] = {0: [(0.0, ())]}
        for k in range(len(self.kinds)):
            merged: dict[int, list[tuple[float, tuple]]] = {}
            for size in self._sizes(k, granularity):
                n = next((i + 1 for i, need in enumerate(self.needs[k][size]) if need <= block_bytes), None)
                if n is None:
                    continue
                blocks = self.costs.own_blocks(k, size, granularity)
                mine = n * (block_bytes * blocks + self.costs.toll)
                for groups, entries in best.items():
                    if groups + n <= self.max_groups:
                        new = [(cost + mine, (*choices, (size, n))) for cost, choices in entries]
                        merged.setdefault(groups + n, []).extend(new)
            # Sorting is stable, so of equals the size that came first wins.
            best = {g: sorted(entries, key=lambda e: e[0])[:2] for g, entries in merged.items()}
        every = sorted((entry for entries in best.values() for entry in entries), key=lambda e: e[0])
        return [choices for _, choices in every[:2]]
