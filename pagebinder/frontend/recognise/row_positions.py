"""Numbers of rows that a model counts itself, in place of the positions that it is (or is not) given.

Matches:
    arange(T), arange(a, a + T), arange(a, a + b T, b) of whole numbers, T tokens in the call
    cumsum of T ones
    table[a : a + T] of any dimension of a table whose size is fixed
    x[positions] of an x that has a row for each of T tokens: cos[:T][position_ids], as rotary embeddings were written
    what is left of them when masks are recognised
Replaces with:
    positions * b + a                            cast at last, if the numbers have another dtype
    positions + 1
    table[positions + a]
    x

A model is captured on whole sequences, whose row i is position i: there both are the same numbers, so the graph means
what it meant. In a step that holds a part of a sequence, or several, only positions say it. What is done with them is
for the audit to judge, as with positions that a model is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.mask_values import fill_of, token_dims
from pagebinder.graph_tools import (
    CASTS,
    IDENTITIES,
    arg,
    aten,
    calls,
    describe,
    finish,
    insert_call,
    is_call,
    skip_casts,
    val,
)  # fmt: skip
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "row_positions"
ROUNDED = "numbers of 16 bits that do not begin with 0: torch rounds them in several ways; count in int64 and convert"


def recognise_row_positions(gm: GraphModule) -> PassResult:
    """Of a decoder's graph, whose inputs are input_ids [T] and positions [T]."""
    result = PassResult(name="recognise_row_positions")
    inputs = {n.target: n for n in gm.graph.nodes if n.op == "placeholder"}
    positions = inputs.get("positions")
    for node in calls(gm.graph, *_FORMS, *_LOOK_UPS) if positions is not None else ():
        if node.target in _LOOK_UPS:
            if (own := _LOOK_UPS[node.target](gm, node, positions)) is not None:
                result.matches.append(Match(pattern=PATTERN, **describe(node)))
                node.replace_all_uses_with(own)
                gm.graph.erase_node(node)
            continue
        start_and_step, replacement = _FORMS[node.target]
        if val(node).device != val(positions).device or (numbers := start_and_step(node, positions)) is None:
            continue
        if numbers[0] != 0 and val(node).dtype in (torch.bfloat16, torch.float16) and replacement is _counted:
            result.refusals.append(Refusal(pattern=PATTERN, reason=ROUNDED, **describe(node)))
            continue
        result.matches.append(Match(pattern=PATTERN, **describe(node)))
        node.replace_all_uses_with(replacement(gm, node, _rows(gm, node, positions, *numbers)))
        gm.graph.erase_node(node)
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _rows(gm: GraphModule, node: Node, positions: Node, start: int, step: int) -> Node:
    rows = positions
    if step != 1:
        rows = insert_call(gm.graph, node, aten.mul.Tensor, (rows, step))
    return rows if start == 0 else insert_call(gm.graph, node, aten.add.Tensor, (rows, start))


def _counted(gm: GraphModule, node: Node, rows: Node) -> Node:
    """The numbers of rows themselves, in the shape and dtype of those that were counted."""
    if val(node).dtype is not val(rows).dtype:
        rows = insert_call(gm.graph, node, aten.to.dtype, (rows, val(node).dtype))
    (dim,) = token_dims(node)
    for place in range(val(node).dim() - 1):
        rows = insert_call(gm.graph, node, aten.unsqueeze.default, (rows, 0 if place < dim else -1))
    return rows


def _looked_up(gm: GraphModule, node: Node, rows: Node) -> Node:
    before = [None] * (arg(node, 1, "dim", 0) % val(node).dim())
    return insert_call(gm.graph, node, aten.index.Tensor, (node.args[0], [*before, rows]))


def _rows_of_index(gm: GraphModule, node: Node, positions: Node) -> Node | None:
    """x, in the shape of x[:, positions]; None: another index, or x has other rows."""
    x, indices = node.args
    (dim, index), *others = ((d, i) for d, i in enumerate(indices) if i is not None)
    if others or not _are_positions(index, positions) or not _by_token(x, dim, positions):
        return None
    (place,) = token_dims(index)
    for d in range(val(index).dim() - 1):
        x = insert_call(gm.graph, node, aten.unsqueeze.default, (x, dim + d if d < place else dim + d + 1))
    return x


def _rows_of_embedding(gm: GraphModule, node: Node, positions: Node) -> Node | None:
    index = node.args[1]
    if not _are_positions(index, positions) or not _by_token(node.args[0], 0, positions):
        return None
    taken = insert_call(gm.graph, node, aten.index.Tensor, (node.args[0], [index]))
    return _rows_of_index(gm, taken, positions)


def _rows_of_select(gm: GraphModule, node: Node, positions: Node) -> Node | None:
    x, dim, index = node.args
    return x if _are_positions(index, positions) and _by_token(x, dim, positions) else None


def _are_positions(node: Node, positions: Node) -> bool:
    """Are these all positions, in another shape?"""
    if len(token_dims(node)) != 1 or math.prod(s for s in val(node).shape if isinstance(s, int)) != 1:
        return False
    while is_call(node, *_SHAPES) and val(node).dtype in (torch.int64, torch.int32):
        node = node.args[0]
    return node is positions


_SHAPES = (
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.view.default, aten.reshape.default,
    aten.select.int, aten.expand.default, *CASTS, *IDENTITIES,
)  # fmt: skip


def _of_arange(node: Node, positions: Node) -> tuple[int, int] | None:
    """Where whole numbers start, one for each token, and their step; None: they are other numbers."""
    numbers = node.args if node.target is not aten.arange.default else (0, *node.args)
    start, step = numbers[0], numbers[2] if len(numbers) > 2 else 1
    if _by_token(node, 0, positions) and type(start) is type(step) is int:
        return start, step
    return None


def _of_sums(node: Node, positions: Node) -> tuple[int, int] | None:
    dim = node.args[1]
    counts_tokens = fill_of(skip_casts(node.args[0])) == 1 and _by_token(node, dim, positions)
    others = [size for d, size in enumerate(val(node).shape) if d != dim % val(node).dim()]
    return (1, 1) if counts_tokens and math.prod(others) == 1 else None


def _of_slice(node: Node, positions: Node) -> tuple[int, int] | None:
    """Of one that takes a row of a table for each token."""
    dim, start, step = (arg(node, *a) for a in ((1, "dim", 0), (2, "start", 0), (4, "step", 1)))
    of_table = step == 1 and _by_token(node, dim, positions) and not token_dims(node.args[0])
    start = 0 if start is None else start
    return (start, 1) if of_table and type(start) is int and start >= 0 else None


def _by_token(node: Node, dim: int, positions: Node) -> bool:
    """Is this dimension as long as the call has tokens?"""
    size = val(node).shape[dim]
    return isinstance(size, torch.SymInt) and size.node.expr == val(positions).shape[0].node.expr


_LOOK_UPS: dict[object, Callable[[GraphModule, Node, Node], Node | None]] = {
    aten.index.Tensor: _rows_of_index,
    aten.embedding.default: _rows_of_embedding,
    aten.index_select.default: _rows_of_select,
}
_Reads = Callable[[Node, Node], tuple[int, int] | None]
_FORMS: dict[object, tuple[_Reads, Callable[[GraphModule, Node, Node], Node]]] = {
    aten.arange.default: (_of_arange, _counted),
    aten.arange.start: (_of_arange, _counted),
    aten.arange.start_step: (_of_arange, _counted),
    aten.cumsum.default: (_of_sums, _counted),
    aten.slice.Tensor: (_of_slice, _looked_up),
}
