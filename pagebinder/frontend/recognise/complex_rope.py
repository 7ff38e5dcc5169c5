"""Rotary embedding written as a product of complex numbers, made real: inductor has no complex kernels.

Matches:
    c = view_as_complex(x.reshape(..., D/2, 2))
    view_as_real(c * table).flatten(-2)        table: polar(ones, angles), scaled, cast, sliced, unsqueezed
Replaces with:
    pagebinder.rope(x, cos(angles), sin(angles), style="interleaved")
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import (
    CASTS,
    IDENTITIES,
    aten,
    calls,
    describe,
    insert_call,
    is_call,
    source_line,
    val,
)
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "rope"

# Views of a table that mean the same for its real and its imaginary part.
_TABLE_VIEWS = (aten.unsqueeze.default, aten.slice.Tensor, aten.select.int, aten.transpose.int)
_RESHAPES = (aten.view.default, aten.reshape.default, aten.unflatten.int, aten.flatten.using_ints)
_ONES = (aten.ones_like.default, aten.ones.default)


class _NotARotation(Exception):
    """Why the walk from an anchor stopped."""


def recognise_complex_rope(gm: GraphModule, result: PassResult) -> None:
    """Rewrite every rotation by complex numbers; every other complex view of a value is refused."""
    tables: dict[Node, tuple[Node, Node]] = {}
    for anchor in calls(gm.graph, aten.view_as_complex.default):
        try:
            rope = _rewrite(gm, anchor, tables)
        except _NotARotation as miss:
            where = describe(anchor)
            result.refusals.append(
                Refusal(pattern=PATTERN, reason=str(miss), source_line=source_line(anchor), **where)
            )
            continue
        detail = f"style=interleaved, dim={val(rope).shape[-1]}"
        result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(rope)))


def _rewrite(gm: GraphModule, anchor: Node, tables: dict[Node, tuple[Node, Node]]) -> Node:
    x = _paired(anchor)
    product = _only_user(anchor, "the complex value is used in several places")
    if not is_call(product, aten.mul.Tensor) or product.args[0] is product.args[1]:
        raise _NotARotation("the complex value is not multiplied by a table")
    table = product.args[1] if product.args[0] is anchor else product.args[0]
    if not isinstance(table, Node):
        raise _NotARotation("the complex value is multiplied by a number, not by a table of angles")
    real = _only_user(product, "the complex product is used in several places")
    if not is_call(real, aten.view_as_real.default):
        raise _NotARotation("the complex product is not turned back into pairs")
    output = _only_user(real, "the pairs of the product are used in several places")
    if not is_call(output, *_RESHAPES) or not _same_shape(val(output).shape, val(x).shape):
        raise _NotARotation("the pairs of the product are not laid out as the value was")
    if not _same_shape(val(product).shape, val(anchor).shape):
        raise _NotARotation("the table makes the value larger")
    if val(table).shape[-1] != val(anchor).shape[-1]:
        raise _NotARotation("the table does not have one angle per pair")
    cos, sin = _real_tables(gm, table, tables)
    rope = insert_call(
        gm.graph,
        output,
        torch.ops.pagebinder.rope.default,
        (x, cos, sin),
        {"style": "interleaved"},
        value=val(output),
    )
    output.replace_all_uses_with(rope)
    return rope


def _paired(anchor: Node) -> Node:
    """x [..., D] whose neighbouring channels are the real and imaginary parts."""
    pairs = anchor.args[0]
    x = pairs.args[0] if is_call(pairs, *_RESHAPES) else None
    if x is None or isinstance(val(x).shape[-1], torch.SymInt):
        raise _NotARotation("the complex value is not made of neighbouring channels")
    if not _same_shape(val(pairs).shape, (*val(x).shape[:-1], val(x).shape[-1] // 2, 2)):
        raise _NotARotation("the complex value is not made of neighbouring channels")
    if val(x).dtype is not torch.float32:
        raise _NotARotation(f"the rotation is computed in {val(x).dtype}, not in float32")
    return x


def _real_tables(gm: GraphModule, table: Node, known: dict[Node, tuple[Node, Node]]) -> tuple[Node, Node]:
    """(cos, sin) with the scalings and views of a complex table, made once per node of its chain."""
    if table not in known:
        known[table] = _make_tables(gm, table, known)
    return known[table]


def _make_tables(gm: GraphModule, table: Node, known: dict[Node, tuple[Node, Node]]) -> tuple[Node, Node]:
    if is_call(table, aten.polar.default):
        radius, angles = table.args
        if not is_call(radius, *_ONES):
            raise _NotARotation("the table's numbers are not of length one")
        return tuple(insert_call(gm.graph, table, f, (angles,)) for f in (aten.cos.default, aten.sin.default))
    if is_call(table, *CASTS, *IDENTITIES):
        if val(table).dtype is not val(table.args[0]).dtype:
            raise _NotARotation(f"the table is cast to {val(table).dtype}")
        return _real_tables(gm, table.args[0], known)
    if is_call(table, *_TABLE_VIEWS):
        parts = _real_tables(gm, table.args[0], known)
        return tuple(
            insert_call(gm.graph, table, table.target, (part, *table.args[1:]), dict(table.kwargs))
            for part in parts
        )
    if is_call(table, aten.mul.Tensor) and isinstance(table.args[1], (int, float)):
        parts, factor = _real_tables(gm, table.args[0], known), table.args[1]
        if factor == 1:
            return parts
        return tuple(insert_call(gm.graph, table, aten.mul.Tensor, (part, factor)) for part in parts)
    raise _NotARotation("the factor is not a table of complex numbers made of positions")


def _only_user(node: Node, reason: str) -> Node:
    users = list(node.users)
    if len(users) != 1:
        raise _NotARotation(reason)
    return users[0]


def _same_shape(a, b) -> bool:
    """Equal sizes; symbolic ones are compared as expressions, which adds no guard."""
    return len(a) == len(b) and all(_size(x) == _size(y) for x, y in zip(a, b))


def _size(size):
    return size.node.expr if isinstance(size, torch.SymInt) else size
