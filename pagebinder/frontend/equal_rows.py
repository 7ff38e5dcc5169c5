"""Positions that are counted several times: time, height and width of images, which are one number for text.

    positions [T] -> expand [3, 1, T] -> angles -> cos [3, 1, T, d]        three equal rows
    cos[0, .., 1::3] = cos[1, .., 1::3]                                     writes what is there already
    or cat([part[i] for i, part in enumerate(cos.split(sections, -1))])     joins what was one row

So the rows of a value that is the same along its first dimension are one row, and what writes a part of it over
itself is the value. Nothing else of multimodal RoPE is left, and the recogniser of RoPE finds cosines of positions.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, calls, insert_call, is_call, val

_KEPT = (*CASTS, *IDENTITIES)
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_SPLITS = (aten.split_with_sizes.default, aten.split.Tensor)
_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default)


def merge_equal_rows(gm: GraphModule) -> None:
    """In place; dead nodes are left for `finish`."""
    if not calls(gm.graph, aten.select_scatter.default, *_SPLITS):
        return
    equal: dict[Node, bool] = {}
    rows: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        equal[node] = _are_rows_equal(node, equal)
        if is_call(node, aten.select.int):
            same = _row_of(node, equal, rows)
        elif is_call(node, aten.cat.default):
            same = _joined_again(gm, node, equal)
        else:
            same = _written_over(node, equal)
        if same is not None:
            equal.setdefault(same, False)
            node.replace_all_uses_with(same)
            gm.graph.erase_node(node)


def _are_rows_equal(node: Node, equal: dict[Node, bool]) -> bool:
    """Is each index along the first dimension the same as the others? Not known: no."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    x, rank = (node.args[0] if node.args else None), val(node).dim()
    if is_call(node, aten.expand.default):
        return val(x).dim() < rank or val(x).shape[0] == 1 or equal[x]
    if is_call(node, *_KEPT, aten.slice.Tensor):
        return equal[x]
    if is_call(node, aten.unsqueeze.default):
        return equal[x] and node.args[1] % rank > 0
    if is_call(node, aten.transpose.int):
        return equal[x] and all(dim % rank > 0 for dim in node.args[1:])
    if is_call(node, aten.cat.default):
        return all(equal[part] for part in x) and arg(node, 1, "dim", 0) % rank > 0
    if is_call(node, *_PRODUCTS):
        return rank > 2 and all(_adds_no_rows(other, rank, equal) for other in node.args)
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return rank > 0 and all(_adds_no_rows(other, rank, equal) for other in node.all_input_nodes)
    return False


def _adds_no_rows(operand, rank: int, equal: dict[Node, bool]) -> bool:
    """Is an operand of an op that broadcasts the same for each index of the result's first dimension?"""
    value = val(operand)
    if not isinstance(value, torch.Tensor):  # a number made of sizes
        return True
    return value.dim() < rank or value.shape[0] == 1 or equal[operand]


def _row_of(node: Node, equal: dict[Node, bool], rows: dict[Node, Node]) -> Node | None:
    """The first row that was taken of the same value, if there is one and all rows are equal."""
    x = node.args[0]
    if node.args[1] % val(x).dim() or not equal[x]:
        return None
    first = rows.setdefault(x, node)
    return None if first is node else first


def _joined_again(gm: GraphModule, node: Node, equal: dict[Node, bool]) -> Node | None:
    """A row of a value, of rows of all of whose parts `node` is made in their order."""
    rows, dim = node.args[0], arg(node, 1, "dim", 0)
    if not all(is_call(row, aten.select.int) and is_call(row.args[0], operator.getitem) for row in rows):
        return None
    split = rows[0].args[0].args[0]
    if not is_call(split, *_SPLITS) or not equal[split.args[0]]:
        return None
    x, along, rank = split.args[0], arg(split, 2, "dim", 0), val(split.args[0]).dim()
    parts = [row.args[0].args for row in rows]
    is_whole = parts == [(split, i) for i in range(len(split.meta["val"]))]
    if not is_whole or any(row.args[1] % rank for row in rows) or dim % (rank - 1) != along % rank - 1:
        return None
    return insert_call(gm.graph, node, aten.select.int, (x, 0, 0))


def _written_over(node: Node, equal: dict[Node, bool]) -> Node | None:
    """The value that a scatter leaves as it was, or of which a copy is made."""
    if not is_call(node, *_SCATTERS):
        return None
    x, source = node.args[:2]
    if is_call(node, aten.copy.default):
        same = val(x).dtype is val(source).dtype and str(val(x).shape) == str(val(source).shape)
        return source if same and val(x).device == val(source).device else None
    if is_call(node, aten.select_scatter.default):
        of_itself = is_call(source, aten.select.int) and source.args[0] is x and equal[x]
        return x if of_itself and source.args[1] == node.args[2] == 0 else None
    place = [arg(node, i, name) for i, name in ((2, "dim"), (3, "start"), (4, "end"), (5, "step"))]
    read = [arg(source, i, name) for i, name in ((1, "dim"), (2, "start"), (3, "end"), (4, "step"))]
    of_itself = is_call(source, aten.slice.Tensor) and source.args[0] is x
    return x if of_itself and place == read else None
