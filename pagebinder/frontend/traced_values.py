"""What a value is made of, while it is traced: nodes of the graph that is being written."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from pagebinder.graph_tools import aten, storage_of, tensors, written_by

# Operands whose layout alone counts, by op: their places.
OF_LAYOUT = {
    **dict.fromkeys((
        aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default,
        aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default,
    ), 0),
    **dict.fromkeys((aten.type_as.default, aten.expand_as.default, aten.view_as.default), 1),
}  # fmt: skip


def node_of(value: torch.Tensor) -> Node | None:
    """None: nothing is traced, or it was there before."""
    mode = get_proxy_mode()
    traced = None if mode is None else get_proxy_slot(value, mode.tracer, None)
    return None if traced is None else traced.proxy.node


def nodes_behind(value: torch.Tensor) -> set[Node] | None:
    """Its node and all that its values are made of, with what was written into them in place; None: see `node_of`.
    Sizes say nothing of values."""
    node = node_of(value)
    if node is None:
        return None
    writes, behind, queue = _writes(node.graph), set(), [node]
    while queue:
        node = queue.pop()
        if node in behind or not _has_values(node):
            continue
        behind.add(node)
        queue += _operands(node)
        for tensor in tensors(node):
            for write in writes.get(storage_of(tensor), ()):
                queue += [write, *_operands(write)]
    return behind


def all_behind(node: Node) -> list[Node]:
    """It and all nodes that its values or sizes are made of, with what was written into them; in their order."""
    writes, behind, queue = _writes(node.graph), set(), [node]
    while queue:
        node = queue.pop()
        if node not in behind:
            behind.add(node)
            queue += node.all_input_nodes
            queue += [write for tensor in tensors(node) for write in writes.get(storage_of(tensor), ())]
    return [n for n in node.graph.nodes if n in behind]


def _has_values(node: Node) -> bool:
    """Is it a tensor, several, or a number that was read from one? Numbers made of sizes are none."""
    if tensors(node):
        return True
    number = node.meta.get("val")
    symbols = number.node.expr.free_symbols if isinstance(number, (torch.SymInt, torch.SymFloat)) else ()
    return any(str(symbol).startswith(("u", "zu")) for symbol in symbols)


def _writes(graph: Graph) -> dict[int, list[Node]]:
    """Calls that write in place, by the memory they write into."""
    writes = defaultdict(list)
    for node in graph.nodes:
        for written in written_by(node):
            for tensor in tensors(written):
                writes[storage_of(tensor)].append(node)
    return writes


def _operands(node: Node) -> list[Node]:
    unread: Any = OF_LAYOUT.get(node.target)
    skipped = node.args[unread] if unread is not None and unread < len(node.args) else None
    others = [arg for place, arg in enumerate(node.args) if place != unread]
    return [n for n in node.all_input_nodes if n is not skipped or n in others]
