"""Writes into tensors that nobody else sees, as calls that return a new tensor.

    w = topk(...)[0]; w.div_(s)    ->    w2 = div(w, s), and w2 wherever w is read behind it

`run_decompositions` makes a whole program functional by tracing it anew, which takes as long as the export. Most
models only write once or twice into what they have just made, and that can be read off the graph: the write's operand
is the whole of a tensor that an op made, and no view of it that was taken before is read behind the write. Writes of
another kind are left as they are.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from pagebinder.graph_tools import aten, is_composite, operands, set_val

NOTHING: frozenset[Node] = frozenset()
# Ops that are made of others, so that their schema does not say what they return; these return a new tensor.
NEW = {aten.linear.default, aten.matmul.default, aten.softmax.int, aten.log_softmax.int}


def write_out_of_place(graph: torch.fx.Graph) -> None:
    """Replace the writes whose values can be told to be seen by nobody else; others stay."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    memory: dict[Node, frozenset[Node]] = {}  # of each node: those that made the memory its value may lie in
    for node in graph.nodes:
        target = _out_of_place(node)
        if target is not None and _is_alone(node, order, memory):
            _replace(node, target, order)
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


def _is_alone(write: Node, order: dict[Node, int], memory: dict[Node, frozenset[Node]]) -> bool:
    """Is the operand all of a new tensor, and read behind the write under no other name?"""
    base = write.args[0]
    if not isinstance(base, Node) or memory[base] != {base} or base.op != "call_function":
        return False
    if base.target is operator.getitem:
        parent, index = base.args
        if any(u is not base and u.args[1:] == (index,) for u in parent.users):
            return False
    others = (node for node, places in memory.items() if node is not base and base in places)
    return all(order[user] < order[write] for node in others for user in node.users)


def _replace(write: Node, target: torch._ops.OpOverload, order: dict[Node, int]) -> None:
    in_place, was, base = write.target, write.meta["val"], write.args[0]
    write.target = target
    set_val(write)
    now, write.meta["val"] = write.meta["val"], was
    if _facts(now) != _facts(was):  # a write keeps dtype and strides, and an op may choose others
        write.target = in_place
        return
    base.replace_all_uses_with(write, delete_user_cb=lambda user: order[user] > order[write])


def _facts(tensor: torch.Tensor) -> tuple:
    """dtype, device, sizes and strides, symbols by their expression."""
    layout = [
        str(n.node.expr) if isinstance(n, torch.SymInt) else str(n) for n in (*tensor.shape, *tensor.stride())
    ]
    return tensor.dtype, tensor.device, layout
