"""Which launches go to the side stream: branches between a fork and the join that reads all of them.

    fork ──┬── a1 ── a2 ──┬── join        main  fork  a1  a2  wait  join
           └── b1 ── b2 ──┘               side        b1  b2  record

A branch of a join is everything whose results reach the rest of the graph through one node, and that node's through
the join alone: a subtree below the join in the tree of post-dominators (Cooper, Harvey and Kennedy: A Simple, Fast
Dominance Algorithm). So only a branch's last node is read by others, and nothing of it is needed after the join. What
several branches read before they part (the fork, a projection) stays on the main stream.

For each join the side gets the set of branches that saves most by the cost estimate, among those that nothing on the
main stream needs before the join. Ties go to the smaller set; the same graph always gets the same answer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch.fx import Node

from pagebinder.runtime.streams.costs import NodeCost, StreamRates, least_seconds
from pagebinder.runtime.streams.launches import Launches, maker

MAIN, SIDE = 0, 1
# Branches of a join of which all sets are tried; of more, those that one branch brings about.
MOST_BRANCHES = 8


@dataclass(frozen=True)
class Region:
    """A join at which work on the side stream ends. `join` is None at the graph's end.

    side: launches beside `beside`; before: launches on the main stream that the side waits for in between.
    Seconds are estimates: of all of them one after the other, and on two streams with their waits.
    """

    join: Node | None
    side: tuple[Node, ...]
    beside: tuple[Node, ...]
    before: tuple[Node, ...]
    serial_seconds: float
    parallel_seconds: float

    @property
    def gain_seconds(self) -> float:
        return self.serial_seconds - self.parallel_seconds


@dataclass(frozen=True)
class StreamPlan:
    """`regions` in order; `side`: launches on the side stream; `refused`: why there are none (None: there are).

    serial_seconds, parallel_seconds: estimates of the whole graph on one stream and on two. The latter counts no more
    than the regions save, each for itself, and no more than is left where one waits for another.
    """

    regions: tuple[Region, ...]
    side: frozenset[Node]
    serial_seconds: float
    parallel_seconds: float
    refused: str | None = None

    @property
    def gain_seconds(self) -> float:
        return self.serial_seconds - self.parallel_seconds


def find_branches(launches: Launches, costs: Mapping[Node, NodeCost], rates: StreamRates) -> StreamPlan:
    """Choose what goes to the side stream. `costs`: of every launch; 0 seconds: it is known to launch nothing."""
    graph = _Graph(launches, costs, rates)
    serial = sum(costs[node].seconds for node in launches.nodes)
    found = [region for join in range(len(graph) + 1) if (region := graph.best_region(join)) is not None]
    if not found:
        why = "every op needs the result of the one before: no two branches lie between a fork and a join"
        return StreamPlan((), frozenset(), serial, serial, why)
    paying = [region for region in found if region.gain_seconds >= rates.least_gain_seconds]
    if not paying:
        return StreamPlan((), frozenset(), serial, serial, _why_none_pays(found))
    accepted = graph.without_overlaps(paying)
    side = frozenset(node for region in accepted for node in region.side)
    alone = serial - sum(region.gain_seconds for region in accepted)
    return StreamPlan(tuple(accepted), side, serial, max(alone, graph.seconds_of(side)))


def _why_none_pays(found: Sequence[Region]) -> str:
    best = max(found, key=lambda region: region.gain_seconds)
    names = [", ".join(dict.fromkeys(op_name(n) for n in nodes)) for nodes in (best.side, best.beside)]
    return (
        f"{len(found)} place(s) where branches could run side by side, and none pays: at the best, {names[0]} beside "
        f"{names[1]}, waits between streams leave {best.gain_seconds * 1e6:.1f} us of {best.serial_seconds * 1e6:.1f}"
    )


def op_name(node: Node) -> str:
    """The op of a call, without its namespace: "paged_attention", "mul"."""
    return getattr(node.target, "_opname", str(node.target))


class _Graph:
    """The launches as numbers in the graph's order; the number after the last is the graph's end."""

    def __init__(self, launches: Launches, costs: Mapping[Node, NodeCost], rates: StreamRates) -> None:
        self.nodes, self.rates = launches.nodes, rates
        self.costs = [costs[node] for node in self.nodes]
        number = {node: i for i, node in enumerate(self.nodes)}
        self.before = [sorted(number[other] for other in launches.before[node]) for node in self.nodes]
        self.after: list[list[int]] = [[] for _ in self.nodes]
        for i, others in enumerate(self.before):
            for other in others:
                self.after[other].append(i)
        self.needs: list[int] = []  # of each launch a set of bits: all that must run before it
        for others in self.before:
            self.needs.append(functools.reduce(lambda bits, i: bits | self.needs[i] | 1 << i, others, 0))
        end = len(self.nodes)
        makers = {number[maker(value)] for value in launches.results}
        for i, others in enumerate(self.after):
            if not others or i in makers:
                others.append(end)
        self.parent = self._post_dominators()
        self.children: list[list[int]] = [[] for _ in range(end + 1)]
        for i, parent in enumerate(self.parent):
            self.children[parent].append(i)

    def __len__(self) -> int:
        return len(self.nodes)

    def _post_dominators(self) -> list[int]:
        """Of each launch the first that all ways from it to the end pass through."""
        parent = [0] * len(self.nodes)
        for i in reversed(range(len(self.nodes))):
            meet, *others = self.after[i]
            for other in others:
                while meet != other:
                    if meet < other:
                        meet = parent[meet]
                    else:
                        other = parent[other]
            parent[i] = meet
        return parent

    def best_region(self, join: int) -> Region | None:
        """The best split of a join's branches; None where all of them need one another."""
        branches = _Branches(self, join)
        regions = [
            region
            for chosen in branches.side_sets()
            if (region := self._region(branches, chosen)) is not None
        ]
        # The first of equals, which is the smallest set.
        return max(regions, key=lambda region: round(region.gain_seconds * 1e9), default=None)

    def _region(self, branches: _Branches, chosen: frozenset[int]) -> Region | None:
        side, beside, before = branches.split(chosen)
        if not (self._is_real(side) and self._is_real(beside)):
            return None
        concerned = [self.costs[i] for i in (*side, *beside, *before)]
        parallel = max(self._on_two_streams(sorted((*beside, *before)), side), least_seconds(concerned))
        join = None if branches.join == len(self.nodes) else self.nodes[branches.join]
        side, beside, before = ([self.nodes[i] for i in numbers] for numbers in (side, beside, before))
        serial = sum(cost.seconds for cost in concerned)
        return Region(join, tuple(side), tuple(beside), tuple(before), serial, parallel)

    def _is_real(self, numbers: Sequence[int]) -> bool:
        return any(self.costs[i].seconds > 0 for i in numbers)

    def _on_two_streams(self, main: Sequence[int], side: Sequence[int]) -> float:
        """Seconds from the fork, which both wait for, to the join."""
        stream = dict.fromkeys(main, MAIN) | dict.fromkeys(side, SIDE)
        wait = self.rates.wait_seconds
        free, finished = [0.0, wait], {}
        for i in sorted(stream):
            mine = stream[i]
            others = [finished[j] + wait for j in self.before[i] if stream.get(j, mine) != mine]
            finished[i] = free[mine] = max(free[mine], *others, 0.0) + self.costs[i].seconds
        return max(free[MAIN], free[SIDE] + wait)

    def seconds_of(self, side: frozenset[Node]) -> float:
        """Of the whole graph on two streams."""
        numbers: tuple[list[int], list[int]] = ([], [])
        for i, node in enumerate(self.nodes):
            numbers[node in side].append(i)
        return self._on_two_streams(*numbers)

    def without_overlaps(self, regions: Sequence[Region]) -> list[Region]:
        """Regions that share no launch, those that save most first; in the graph's order."""
        order = {node: i for i, node in enumerate(self.nodes)} | {None: len(self.nodes)}
        taken: set[Node] = set()
        accepted = []
        for region in sorted(regions, key=lambda r: (-round(r.gain_seconds * 1e9), order[r.join])):
            concerned = {*region.side, *region.beside, *region.before}
            if not concerned & taken:
                taken |= concerned
                accepted.append(region)
        return sorted(accepted, key=lambda r: order[r.join])


class _Branches:
    """The branches of a join, by their last launches, and who needs whom."""

    def __init__(self, graph: _Graph, join: int) -> None:
        self.graph, self.join = graph, join
        self.heads = graph.children[join]
        needs = {head: self._readers(head) for head in self.heads}
        self.readers: dict[int, frozenset[int]] = {}  # of each head, those that need it, directly or not
        for head in reversed(self.heads):
            direct = needs[head]
            self.readers[head] = frozenset(direct).union(*(self.readers[other] for other in direct))
        self.free = self._independent()

    def _readers(self, head: int) -> set[int]:
        """Heads of the branches that read this one: its last launch alone has readers outside."""
        found = set()
        for reader in self.graph.after[head]:
            while reader != self.join:
                if self.graph.parent[reader] == self.join:
                    found.add(reader)
                reader = self.graph.parent[reader]
        return found

    def _independent(self) -> list[int]:
        """Heads that neither need nor are needed by every other one."""
        related = {h: set(self.readers[h]) for h in self.heads}
        for head, readers in self.readers.items():
            for reader in readers:
                related[reader].add(head)
        return [h for h in self.heads if len(related[h]) < len(self.heads) - 1]

    def side_sets(self) -> list[frozenset[int]]:
        """Sets of branches that no branch outside of them needs, the smaller first."""
        if len(self.free) > MOST_BRANCHES:
            sets = [frozenset({head, *self.readers[head]}) for head in self.free]
            return sorted(dict.fromkeys(sets), key=lambda one: (len(one), sorted(one)))
        sizes = range(1, len(self.free))
        sets = [frozenset(chosen) for size in sizes for chosen in combinations(self.free, size)]
        return [one for one in sets if all(self.readers[head] <= one for head in one)]

    def split(self, chosen: frozenset[int]) -> tuple[list[int], list[int], list[int]]:
        """Launches on the side; those of branches beside it; of those that it waits for without following them."""
        side = [i for head in chosen for i in self._launches(head)]
        needed = {h for h in self.heads if self.readers[h] & chosen} - chosen
        needed = {h for h in needed if not all(self.graph.needs[i] >> h & 1 for i in side)}
        beside = set(self.free) - chosen - needed
        return tuple(
            sorted(i for head in heads for i in self._launches(head)) for heads in (chosen, beside, needed)
        )

    def _launches(self, head: int) -> list[int]:
        found, queue = [], [head]
        while queue:
            found.append(queue.pop())
            queue += self.graph.children[found[-1]]
        return found
