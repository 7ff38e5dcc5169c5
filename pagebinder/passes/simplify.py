"""Removes casts, products and dropouts that change nothing and views that undo each other.

Matches:
    cast(x) to x's own dtype | alias(x) | x * 1 | x / 1.0 | dropout(x) outside training
    transpose(transpose(x, a, b), a, b) | select(unsqueeze(x, 0), 0, 0)
Replaces with:
    x
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import CASTS, arg, aten, describe, finish, is_call, val
from pagebinder.report import Match, PassResult

PATTERN = "no_op"


def simplify(gm: GraphModule) -> PassResult:
    """Drop no-op nodes; one sweep in execution order reaches chains, since inputs are simplified first."""
    result = PassResult(name="simplify")
    for node in list(gm.graph.nodes):
        source = _equivalent(node)
        if source is None:
            continue
        result.matches.append(Match(pattern=PATTERN, detail=str(node.target), **describe(node)))
        node.replace_all_uses_with(source)
        gm.graph.erase_node(node)
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _equivalent(node: Node) -> Node | None:
    """An earlier node with the same value, or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    x = node.args[0]
    if is_call(node, *CASTS, aten.alias.default, aten.detach.default):
        same = val(node).dtype is val(x).dtype and val(node).device == val(x).device
        keeps_layout = not any(
            isinstance(a, torch.memory_format) for a in (*node.args, *node.kwargs.values())
        )
        return x if same and keeps_layout else None
    if is_call(node, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        factor = node.args[1]
        same = isinstance(factor, (int, float)) and factor == 1 and val(node).dtype is val(x).dtype
        return x if same else None
    if is_call(node, aten.dropout.default):
        return None if arg(node, 2, "train") else x
    if is_call(node, aten.transpose.int) and is_call(x, aten.transpose.int):
        rank = val(node).dim()
        return x.args[0] if _dims(node, rank) == _dims(x, rank) else None
    if is_call(node, aten.select.int) and is_call(x, aten.unsqueeze.default):
        return x.args[0] if x.args[1] == node.args[1] == 0 and node.args[2] == 0 else None
    return None


def _dims(transpose: Node, rank: int) -> set[int]:
    return {transpose.args[1] % rank, transpose.args[2] % rank}
