"""Graphs of models that return the logits of the last token alone, as many do when they are given no targets.

Matches:
    head(x[:, -1:]), head(x[:, [-1]]), head(x[:, -1]), head(x)[:, -1], head(x[:, T - 1:]): one row of T, the last one
Replaces with:
    head(x), all T rows of it

Row t of the new graph is what the model returns for the first t + 1 tokens: no row before the chosen one sees a later
token, which the audit proves of the graph as a whole, as it proves that nothing behind the choice mixes rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from pagebinder.errors import CaptureError
from pagebinder.graph_tools import (
    arg,
    aten,
    attribute,
    finish,
    insert_call,
    is_call,
    set_val,
    source_line,
    val,
)

ROUTE = ", the last token's logits taken of every token"


def every_row(gm: GraphModule, model: str) -> bool:
    """In place: a captured graph that returns [1, V], made of its last token, returns [T, V]. False: it is another.

    Raises:
        CaptureError: what is done with the last row is written for one row alone.
    """
    (output,) = gm.graph.find_nodes(op="output")
    num_tokens = val(next(n for n in gm.graph.nodes if n.target == "input_ids")).shape[0]
    rows = output.args[0]
    if val(rows).dim() != 2 or val(rows).shape[0] != 1:
        return False
    behind = _behind(rows)
    chosen = [n for n in behind if n.op == "call_function" and _is_last_row(gm, n, num_tokens)]
    if not chosen:
        return False
    changed = {_all_rows(gm, node) for node in chosen}
    for node in gm.graph.nodes:
        if node.op == "call_function" and changed & {*node.all_input_nodes}:
            _compute(node, model)
            changed.add(node)
    rows = output.args[0]
    if val(rows).dim() == 3 and val(rows).shape[0] == 1:
        with gm.graph.inserting_before(output):
            output.args = (insert_call(gm.graph, output, aten.select.int, (rows, 0, 0)),)
    finish(gm)
    return True


def _behind(node: Node) -> set[Node]:
    """What `node` is computed of, itself included."""
    found, queue = {node}, [node]
    while queue:
        new = [n for n in queue.pop().all_input_nodes if n not in found]
        found.update(new)
        queue += new
    return found


def _is_last_row(gm: GraphModule, node: Node, num_tokens: torch.SymInt) -> bool:
    dim = _FORMS[node.target](gm, node) if node.target in _FORMS else None
    if dim is None:
        return False
    size = val(node.args[0]).shape[dim]
    return isinstance(size, torch.SymInt) and size.node.expr == num_tokens.node.expr


def _of_slice(gm: GraphModule, node: Node) -> int | None:
    """The dimension of which a node takes the last row; None: it takes another one, or several."""
    dim, start = arg(node, 1, "dim", 0), arg(node, 2, "start", 0)
    return dim if val(node).shape[dim] == 1 and _is_last(start, val(node.args[0]).shape[dim]) else None


def _of_select(gm: GraphModule, node: Node) -> int | None:
    dim, index = node.args[1:]
    return dim if _is_last(index, val(node.args[0]).shape[dim]) else None


def _of_index(gm: GraphModule, node: Node) -> int | None:
    indices = node.args[1]
    (dim, index), *others = ((d, i) for d, i in enumerate(indices) if i is not None)
    return dim if not others and _is_minus_one(gm, index) else None


_FORMS: dict[object, Callable[[GraphModule, Node], int | None]] = {
    aten.slice.Tensor: _of_slice,
    aten.narrow.default: _of_slice,
    aten.select.int: _of_select,
    aten.index.Tensor: _of_index,
}


def _is_last(index: int | Node, size: int | torch.SymInt) -> bool:
    """Is it -1, or size - 1 as the model computes it?"""
    if not isinstance(index, Node):
        return type(index) is int and index == -1
    value, size = index.meta.get("val"), getattr(size, "node", None)
    return isinstance(value, torch.SymInt) and size is not None and value.node.expr == size.expr - 1


def _is_minus_one(gm: GraphModule, node: Node) -> bool:
    """Is it a constant [-1]?"""
    while is_call(node, aten.lift_fresh_copy.default, aten.detach.default, aten.detach_.default):
        node = node.args[0]
    if node.op != "get_attr":
        return False
    value = attribute(gm, node.target)
    return value.shape == (1,) and not value.is_meta and value.dtype is torch.int64 and value.item() == -1


def _all_rows(gm: GraphModule, node: Node) -> Node:
    """What has all rows in place of the node, which is erased. A selected one had lost its dimension: of a sequence
    on its own another one of size 1 goes instead."""
    rows = node.args[0]
    if is_call(node, aten.select.int) and val(rows).dim() > 1 and val(rows).shape[0] == 1:
        rows = insert_call(gm.graph, node, aten.select.int, (rows, 0, 0))
    node.replace_all_uses_with(rows)
    gm.graph.erase_node(node)
    return rows


def _compute(node: Node, model: str) -> None:
    try:
        set_val(node)
    except Exception as error:  # whatever an op says of its shapes
        raise CaptureError(
            f"{model} returns the logits of the last token alone, and computes them for one row "
            f"({source_line(node)}), not for several: {str(error).splitlines()[0]}. Return logits [1, T, V]."
        ) from error
