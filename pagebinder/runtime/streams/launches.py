"""Which nodes of a graph launch work, and which of them must run after which.

    data       a node reads what another made, also through views, sizes and picked results
    memory     a node that writes to a storage, and those that read or write it before and after, in the graph's order

Both follow from the ops' schemas alone: `Tensor(a!)` is written, what returns `Tensor(a)` shares memory with its
operand. Views, sizes and picked results launch nothing: the host makes them whenever they are needed.

An op that torch puts together from others and that says nothing of its results (`dropout`), or may copy or not
(`reshape`), counts as both: it launches, and its result may share memory with any operand.

A graph's inputs are different memory each. So are the caches of all layers, though they are views of one arena: their
pages are disjoint, and a block belongs to one group at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import is_composite, operands, written_by

DATA, READ_AFTER_WRITE = "data", "read after write"
WRITE_AFTER_READ, WRITE_AFTER_WRITE = "write after read", "write after write"


class UnknownEffects(ValueError):
    """What a node reads and writes cannot be told from how it is registered."""


@dataclass(frozen=True)
class Launches:
    """Nodes that launch work, in the graph's order, and what holds between them.

    before: node -> {node that must have run: why}. values: node -> values that it reads, as `is_value` nodes.
    storages: value -> nodes that made the memory which it may lie in; inputs and weights among them.
    results: values that the graph returns.
    """

    nodes: tuple[Node, ...]
    before: dict[Node, dict[Node, str]]
    values: dict[Node, tuple[Node, ...]]
    storages: dict[Node, frozenset[Node]]
    results: tuple[Node, ...]


def launch_order(gm: GraphModule) -> Launches:
    """Read a graph.

    Raises:
        UnknownEffects: a node is no op with a schema, or writes to a weight.
    """
    storages: dict[Node, frozenset[Node]] = {}
    memory = _Memory()
    nodes, before, values = [], {}, {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        storages[node] = _storages(node, storages)
        if node.op != "call_function" or not launches(node):
            continue
        read = tuple(dict.fromkeys(v for operand in node.all_input_nodes for v in values_behind(operand)))
        after = {maker(v): DATA for v in read}
        written = frozenset().union(*(storages[w] for w in written_by(node)))
        if any(one.op == "get_attr" for one in written):
            raise UnknownEffects(f"{node.name} ({node.target}) writes to a weight")
        touched = frozenset().union(*(storages[operand] for operand in node.all_input_nodes))
        for other, why in memory.touch(node, touched | written, written):
            after.setdefault(other, why)
        nodes.append(node)
        before[node], values[node] = after, read
    output = next(n for n in gm.graph.nodes if n.op == "output")
    results = dict.fromkeys(v for operand in output.all_input_nodes for v in values_behind(operand))
    return Launches(tuple(nodes), before, values, storages, tuple(results))


class _Memory:
    """Who wrote to a storage last, and who has read it since."""

    def __init__(self) -> None:
        self._writer: dict[Node, Node] = {}
        self._readers: dict[Node, list[Node]] = {}

    def touch(
        self, node: Node, touched: frozenset[Node], written: frozenset[Node]
    ) -> Iterator[tuple[Node, str]]:
        """Note what a node does; yields the nodes that it must come after, and why."""
        for storage in touched:
            writes = storage in written
            if storage in self._writer:
                yield self._writer[storage], WRITE_AFTER_WRITE if writes else READ_AFTER_WRITE
            if writes:
                for reader in self._readers.pop(storage, ()):
                    yield reader, WRITE_AFTER_READ
                self._writer[storage] = node
            else:
                self._readers.setdefault(storage, []).append(node)


def launches(node: Node) -> bool:
    """Whether a call may launch work. Raises UnknownEffects."""
    target = node.target
    if target is operator.getitem:
        return False
    if not isinstance(target, torch._ops.OpOverload):
        if any(_is_tensor(n.meta.get("val")) for n in (node, *node.all_input_nodes)):
            raise UnknownEffects(f"{node.name} calls {target}, which is no op with a schema")
        return False
    if not node.users:
        return True  # a check, or a write without a result
    returns = target._schema.returns
    if not target._schema.is_mutable and all(str(r.real_type) in ("int", "SymInt") for r in returns):
        return False  # sizes and strides
    if not any("Tensor" in str(x.type) for x in (*target._schema.arguments, *returns)):
        return False
    views = all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return not views or target._schema.is_mutable or is_composite(target)


def is_value(node: Node) -> bool:
    """A result of a launch: what it returns, or one of several tensors that it returns."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return node.args[0].op == "call_function" and launches(node.args[0])
    return launches(node)


def maker(value: Node) -> Node:
    """The launch that a value is a result of."""
    return value.args[0] if value.target is operator.getitem else value


def values_behind(node: Node) -> list[Node]:
    """Values that a node is, or is made of without a launch; inputs and weights are none."""
    if is_value(node):
        return [node]
    if node.op != "call_function":
        return []
    return list(dict.fromkeys(v for operand in node.all_input_nodes for v in values_behind(operand)))


def _storages(node: Node, known: dict[Node, frozenset[Node]]) -> frozenset[Node]:
    """Nodes whose memory a node's value may lie in; itself, if it may allocate."""
    if node.op in ("placeholder", "get_attr"):
        return frozenset({node})
    if node.op != "call_function":
        raise UnknownEffects(f"{node.name} is a {node.op}, which has no schema")
    if node.target is operator.getitem:
        return known[node.args[0]]
    if not isinstance(node.target, torch._ops.OpOverload):
        return frozenset()
    returns = node.target._schema.returns
    implicit = is_composite(node.target)
    shared = [n for argument, n in operands(node) if implicit or argument.alias_info is not None]
    found = frozenset().union(*(known[n] for n in shared)) if _aliases(returns) or implicit else frozenset()
    allocates = implicit or any(r.alias_info is None for r in returns)
    return found | {node} if allocates else found


def _aliases(returns) -> bool:
    return any(r.alias_info is not None for r in returns)


def _is_tensor(value) -> bool:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(v, torch.Tensor) for v in values)
