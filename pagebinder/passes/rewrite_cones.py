"""What a pass rewrote, cut out of the graphs before and after it: pairs of subgraphs with the same inputs.

    before   x ---- cast -- pow -- mean -- rsqrt -- mul -- mul ---- user          removed: cast .. mul
    after    x ---------------- rms_norm --------------------------- user         added: rms_norm
             ^ input of both                                  ^ the pair (mul, rms_norm): what users were rerouted to

Nodes are matched by name: what has the same name, target and literals in both graphs was kept. Removed and added
nodes are paired where a kept user was rerouted from one to the other, or where the added one inherited the very
description (meta["val"]) of the removed one. A cone is what lies between a pair and the nearest values that both
graphs have: kept nodes, or other pairs. Each cone is proven on its own, so together they prove the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from pagebinder.graph_tools import written_by

# How far above a value that only one side reads its origin is looked for, in nodes.
MAX_ORIGIN_DISTANCE = 12
# The same for values that one side each reads, and that may be made of one value.
MAX_SHARED_DISTANCE = 3
SOURCES = ("placeholder", "get_attr")


class Diff:
    """Which nodes of two graphs are the same, and which pairs replace one another."""

    def __init__(self, before: Graph, after: Graph) -> None:
        self.before, self.after = before, after
        old = {n.name: n for n in before.nodes}
        self.kept: dict[Node, Node] = {}  # node before -> node after
        for node in after.nodes:
            other = old.get(node.name)
            if other is not None and _skeleton(other) == _skeleton(node):
                self.kept[other] = node
        self.kept_after = {a: b for b, a in self.kept.items()}
        self.pairs = self._rerouted() | self._inherited()  # (before, after) -> None, in order

    def _rerouted(self) -> dict[tuple[Node, Node], None]:
        """Values that kept nodes read before and after, where they differ."""
        found = {}
        for user_before, user_after in self.kept.items():
            for b, a in zip(_operands(user_before), _operands(user_after), strict=True):
                if self.kept.get(b) is not a:
                    found[b, a] = None
        return found

    def _inherited(self) -> dict[tuple[Node, Node], None]:
        removed = {
            id(n.meta.get("val")): n
            for n in self.before.nodes
            if n not in self.kept and isinstance(n.meta.get("val"), torch.Tensor)
        }
        added = [n for n in self.after.nodes if n not in self.kept_after and n.op == "call_function"]
        return {(removed[id(n.meta["val"])], n): None for n in added if id(n.meta.get("val")) in removed}

    def corresponds(self, b: Node, a: Node) -> bool:
        """Do these two stand for the same value?"""
        return self.kept.get(b) is a or (b, a) in self.pairs


@dataclass(frozen=True)
class Cone:
    """The subgraphs of one pair: nodes in execution order, and inputs that both read (None: only one side does)."""

    output: tuple[Node, Node]
    before: tuple[Node, ...]
    after: tuple[Node, ...]
    inputs: tuple[tuple[Node | None, Node | None], ...]

    def graphs(self) -> tuple[GraphModule, GraphModule]:
        """Both subgraphs as modules that take all inputs in order: a side ignores what it does not read."""
        sides = ((self.before, self.output[0], 0), (self.after, self.output[1], 1))
        return tuple(self._extract(nodes, output, side) for nodes, output, side in sides)

    def _extract(self, nodes: tuple[Node, ...], output: Node, side: int) -> GraphModule:
        graph, new = Graph(), {}
        for index, pair in enumerate(self.inputs):
            placeholder = graph.placeholder(f"input_{index}")
            if pair[side] is not None:
                new[pair[side]] = placeholder
        for node in nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(new[output])
        return GraphModule(torch.nn.Module(), graph)


def cones(diff: Diff) -> Iterator[Cone]:
    """The cone of every pair."""
    order = {n: i for graph in (diff.before, diff.after) for i, n in enumerate(graph.nodes)}
    known_before = set(diff.kept) | {b for b, _ in diff.pairs}
    known_after = set(diff.kept_after) | {a for _, a in diff.pairs}
    for pair in diff.pairs:
        yield _Cutter(diff, order, pair, known_before, known_after).cut()


class _Cutter:
    """Finds the cone of one pair: starts with the nearest known values as inputs, and opens those that do not fit."""

    def __init__(self, diff, order, pair, known_before, known_after) -> None:
        self.diff, self.order, self.pair = diff, order, pair
        self.known = (known_before, known_after)
        self.opened: tuple[set[Node], set[Node]] = ({pair[0]}, {pair[1]})
        if pair[1] in diff.kept_after:  # a value that was there before: the subgraph after it is empty
            self.opened[1].clear()
        if pair[0] in diff.kept:
            self.opened[0].clear()

    def cut(self) -> Cone:
        while True:
            inside, inputs = zip(*(self._closure(side) for side in (0, 1)))
            if not self._open_unfit(inputs):
                nodes = [tuple(sorted(side, key=self.order.__getitem__)) for side in inside]
                return Cone(self.pair, *nodes, self._matched(inputs))

    def _closure(self, side: int) -> tuple[set[Node], dict[Node, None]]:
        """Nodes between the pair's node and known values, and these values."""
        inside, inputs, queue = set(), {}, [self.pair[side]]
        while queue:
            node = queue.pop()
            if node in inside or node in inputs:
                continue
            known = node in self.known[side] and node not in self.opened[side]
            if node.op in SOURCES or (
                known and not written_by(node)
            ):  # a value does not tell what was written
                inputs[node] = None
                continue
            inside.add(node)
            queue += list(node.all_input_nodes) + writes_before(node, self.order)
        return inside, inputs

    def _open_unfit(self, inputs: tuple[dict, dict]) -> bool:
        """Open one input that does not fit: the one nearest to the output, as opening it may make others fit.

        First those that only one side has, then those that are made of other inputs, then those whose origin the
        other side reads, or makes another input of, then what is no tensor of floats and could not be random.
        """
        unfits = (
            self._is_unmatched,
            self._is_made_of_others,
            self._hangs_on,
            self._shares_origin,
            self._is_no_data,
        )
        for unfit in unfits:
            found = [
                (side, node)
                for side in (0, 1)
                for node in inputs[side]
                if node.op not in SOURCES and unfit(side, node, inputs)
            ]
            if found:
                side, node = max(found, key=lambda item: self._age(*item))
                partner = self._partner(side, node, inputs[1 - side])
                self.opened[side].add(node)
                if partner is not None:
                    self.opened[1 - side].add(partner)
                return True
        return False

    def _age(self, side: int, node: Node) -> int:
        """Place in the graph before; of an added node, that of the one it is paired with."""
        if side == 1:
            others = [b for b, a in self.diff.pairs if a is node]
            node = self.diff.kept_after.get(node) or others[0]
        return self.order[node]

    def _is_unmatched(self, side: int, node: Node, inputs: tuple[dict, dict]) -> bool:
        is_new = node not in (self.diff.kept, self.diff.kept_after)[side]
        return is_new and self._partner(side, node, inputs[1 - side]) is None

    def _is_made_of_others(self, side: int, node: Node, inputs: tuple[dict, dict]) -> bool:
        """Is it computed from other inputs alone, as the same value in another dtype is? Then it is not free."""
        made_of = [n for n in node.all_input_nodes if n.op != "get_attr"]
        return bool(made_of) and all(n in inputs[side] for n in made_of)

    def _is_no_data(self, side: int, node: Node, inputs: tuple[dict, dict]) -> bool:
        value = node.meta.get("val")
        return not (isinstance(value, torch.Tensor) and value.is_floating_point())

    def _partner(self, side: int, node: Node, others) -> Node | None:
        def same(other: Node) -> bool:
            return self.diff.corresponds(*((node, other) if side == 0 else (other, node)))

        return next((other for other in others if same(other)), None)

    def _hangs_on(self, side: int, node: Node, inputs: tuple[dict, dict]) -> bool:
        """Does one side alone read it, though it is computed nearby from what is read? Then it is not free."""
        if self._partner(side, node, inputs[1 - side]) is not None:
            return False
        kept = (self.diff.kept_after, self.diff.kept)[side]
        read = set(inputs[side]) | {kept[n] for n in inputs[1 - side] if n in kept}
        level = list(node.all_input_nodes)
        if level and all(n in read for n in level):  # of a weight, too: the other side makes the same of it
            return True
        for _ in range(MAX_ORIGIN_DISTANCE):
            if any(n in read and n.op != "get_attr" for n in level):
                return True
            level = [above for n in level for above in n.all_input_nodes][:64]
        return False

    def _shares_origin(self, side: int, node: Node, inputs: tuple[dict, dict]) -> bool:
        """Does one side alone read it, and the other alone another value that is made of the same one?"""
        if self._partner(side, node, inputs[1 - side]) is not None:
            return False
        alone = [n for n in inputs[1 - side] if self._partner(1 - side, n, inputs[side]) is None]
        origins = self._origins(side, node)
        return any(origins & self._origins(1 - side, other) for other in alone if other.op not in SOURCES)

    def _origins(self, side: int, node: Node) -> set[Node]:
        """Computed values nearby that a value is made of, as nodes of the graph before where it has them."""
        found, level = set(), [node]
        for _ in range(MAX_SHARED_DISTANCE):
            level = [above for n in level for above in n.all_input_nodes if above.op not in SOURCES][:64]
            found.update(level)
        return {self.diff.kept_after.get(n, n) for n in found} if side == 1 else found

    def _matched(self, inputs: tuple[dict, dict]) -> tuple:
        pairs, used = [], set()
        for b in inputs[0]:
            a = self._partner(0, b, inputs[1])
            pairs.append((b, a))
            used.add(a)
        return tuple(pairs + [(None, a) for a in inputs[1] if a not in used])


def writes_before(node: Node, order: dict[Node, int]) -> list[Node]:
    """Ops that write to a buffer that this node reads, and come before it: its value depends on them."""
    found = []
    for operand in node.all_input_nodes:
        if operand.op == "placeholder":
            found += [
                u
                for u in operand.users
                if u is not node and operand in written_by(u) and order[u] < order[node]
            ]
    return found


def _skeleton(node: Node) -> tuple:
    """Target and literals of a node, its operands left out."""
    args = map_arg((node.args, node.kwargs), lambda n: None)
    return node.op, str(node.target), str(args)


def _operands(node: Node) -> list[Node]:
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found
