"""Writes into tensors that nobody else sees, as calls that return a new tensor.

    w = topk(...)[0]; w.div_(s)          ->    w2 = div(w, s), and w2 wherever w is read behind it
    f = x.sin(); f[0][..., 1::3] = y     ->    part = copy(f[0][..., 1::3], y)
                                               f2 = select_scatter(f, slice_scatter(f[0], part, ...), 0, 0)

`run_decompositions` makes a whole program functional by tracing it anew, which takes as long as the export. Most
models only write once or twice into what they have just made, and that can be read off the graph: the write's operand
is a tensor that an op made, or entries and slices of one. Views of it that were taken before the write and are read
behind it are taken again. Writes of another kind are left as they are.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch.fx import Node

from pagebinder.graph_tools import aten, insert_call, is_call, is_composite, operands, size_text

NOTHING: frozenset[Node] = frozenset()
# A view -> the op that puts such a part back into a copy of the whole; its operands behind the part are the view's.
SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
# Ops that are made of others, so that their schema does not say what they return; these return a new tensor.
NEW = {aten.linear.default, aten.matmul.default, aten.softmax.int, aten.log_softmax.int}


def write_out_of_place(graph: torch.fx.Graph) -> None:
    """Replace the writes of which all readers can be told; others stay."""
    order: dict[Node, float] = {node: float(at) for at, node in enumerate(graph.nodes)}
    memory: dict[Node, frozenset[Node]] = {}  # of each node: those that made the memory its value may lie in
    for node in list(graph.nodes):
        target = _out_of_place(node)
        write = _write_of(node, order, memory) if target is not None else None
        if write is None or not _replace(write, target, order, memory):
            memory[node] = _memory(node, memory)


def _memory(node: Node, memory: dict[Node, frozenset[Node]]) -> frozenset[Node]:
    if node.op != "call_function":
        return frozenset({node})
    if node.target is operator.getitem:
        whole = memory[node.args[0]]
        return frozenset({node}) if whole == {node.args[0]} and _makes(node.args[0]) else whole
    if not isinstance(node.target, torch._ops.OpOverload):
        return NOTHING  # of sizes
    if _makes(node):
        return frozenset({node})
    if is_its_operand(node):
        return memory[node.args[0]]
    composite = is_composite(node.target)
    shared = (n for argument, n in operands(node) if composite or argument.alias_info is not None)
    return frozenset({node} if composite else ()).union(*(memory[n] for n in shared))


def _makes(node: Node) -> bool:
    """Does the op return new tensors alone?"""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in NEW:
        return True
    return not is_composite(node.target) and all(r.alias_info is None for r in node.target._schema.returns)


def is_its_operand(node: Node) -> bool:
    """Is a call a cast to the dtype that is there, which gives the very tensor?"""
    is_cast = is_call(node, aten.to.dtype, aten.to.device, aten.type_as.default)
    if not is_cast or any(a is True for a in node.args) or node.kwargs:
        return False
    x, y = node.args[0].meta["val"], node.meta["val"]
    return x.dtype is y.dtype and x.device == y.device


def _out_of_place(node: Node) -> torch._ops.OpOverload | None:
    """aten.div.Tensor of a call of aten.div_.Tensor."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    namespace, _, name = schema.name.partition("::")
    if not schema.is_mutable or not name.endswith("_") or name.startswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    found = getattr(packet, node.target._overloadname, None)
    if found is None or found._schema.is_mutable:
        return None
    same = [(a.name, str(a.type)) for a in found._schema.arguments] == [
        (a.name, str(a.type)) for a in schema.arguments
    ]
    written = [a.name for a in schema.arguments if a.is_write]
    return found if same and written == [schema.arguments[0].name] and node.args else None


class _Write(NamedTuple):
    """A write into new memory. `views`: calls from the memory's first tensor, `made`, to what is written, in turns.
    `stale`: other views of it that were taken before and are read behind it, each behind what it is a view of."""

    node: Node
    made: Node
    views: list[Node]
    stale: list[Node]


def _write_of(node: Node, order: dict[Node, float], memory: dict[Node, frozenset[Node]]) -> _Write | None:
    """What a call writes; None: that cannot be told, or memory that others than its readers see."""
    base = node.args[0]
    if not isinstance(base, Node) or len(memory[base]) != 1 or next(iter(memory[base])).op != "call_function":
        return None
    (made,) = memory[base]
    if made.target is operator.getitem:
        parent, index = made.args
        if any(u is not made and u.args[1:] == (index,) for u in parent.users):
            return None
    views = _views_between(made, base)
    if views is None:
        return None
    if any(
        v.target not in SCATTERS and not is_its_operand(v) for v in views
    ):  # right if nobody knows the memory by another name
        made, views = base, []
    stale: dict[Node, None] = {}
    for other, places in memory.items():  # in the order of the graph
        behind = any(order[u] > order[node] for u in other.users) or (other is base and node.users)
        if other is made or not memory[made] & places or not behind:
            continue
        taken = _views_between(made, other)
        if taken is None:
            return None
        stale.update(dict.fromkeys(taken))
    return _Write(node, made, views, list(stale))


def _views_between(made: Node, view: Node) -> list[Node] | None:
    """The calls that take `view` of `made`, one of the other; None: not by views of one tensor each."""
    found: list[Node] = []
    while view is not made:
        if view.op != "call_function" or not isinstance(view.target, torch._ops.OpOverload):
            return None
        shared = [n for argument, n in operands(view) if argument.alias_info is not None]
        is_view = not (is_composite(view.target) or view.target._schema.is_mutable) and shared == [
            view.args[0]
        ]
        if not is_view and not is_its_operand(view):
            return None
        found.append(view)
        view = view.args[0]
    return found[::-1]


def _replace(
    write: _Write,
    target: torch._ops.OpOverload,
    order: dict[Node, float],
    memory: dict[Node, frozenset[Node]],
) -> bool:
    """Put new tensors in place of what a write changes; False: one would be another than the write leaves."""
    node, graph = write.node, write.node.graph
    new = [insert_call(graph, node, target, node.args, dict(node.kwargs))]
    for view, whole in zip(write.views[::-1], [*write.views[-2::-1], write.made] if write.views else ()):
        if view.target not in SCATTERS:  # the whole, under another name
            continue
        new.append(
            insert_call(graph, node, SCATTERS[view.target], (whole, new[-1], *view.args[1:]), view.kwargs)
        )
    part, whole = new[0].meta["val"], new[-1].meta["val"]
    # A write keeps dtype and strides, and an op may choose others.
    if part.dtype != node.meta["val"].dtype or _facts(whole) != _facts(write.made.meta["val"]):
        for one in reversed(new):
            graph.erase_node(one)
        return False
    now = {write.made: new[-1]}
    for view in write.stale:
        again = graph.node_copy(view, lambda n: now.get(n, n))
        node.prepend(again)
        now[view] = again
        new.append(again)
    behind = order[node]
    for place, one in enumerate(new):
        order[one] = behind - 1 + (place + 1) / (len(new) + 1)
        memory[one] = _memory(one, memory)
    if node.users:
        node.replace_all_uses_with(now[node.args[0]])
    for old, one in now.items():
        old.replace_all_uses_with(one, delete_user_cb=lambda user: order[user] > behind)
    graph.erase_node(node)
    return True


def _facts(tensor: torch.Tensor) -> tuple:
    """dtype, device, sizes and strides, symbols by their expression; nobody steps along one element."""
    sizes, strides = ([size_text(n) for n in numbers] for numbers in (tensor.shape, tensor.stride()))
    return tensor.dtype, tensor.device, sizes, [s for n, s in zip(sizes, strides) if n != "1"]
