"""Rotary embedding, half-split style, found from the rotated half and walked outwards.

(The style written with complex numbers is in complex_rope.py, which this pass calls.)

Matches:
    half = cat(-x[..., D/2:], x[..., :D/2])
    x * cos + half * sin          cos, sin: cosine and sine of positions, cast, scaled, unsqueezed
Replaces with:
    pagebinder.rope(x, cos, sin, style="half")
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.recognise.complex_rope import recognise_complex_rope
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
    source_line,
    val,
)
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "rope"

_TABLE_STEPS = (*CASTS, *IDENTITIES, aten.unsqueeze.default, aten.mul.Scalar, aten.slice.Tensor)


def recognise_rope(gm: GraphModule) -> PassResult:
    """Rewrite every half-split and complex rotation; refuse every other product with a position's cosine."""
    result = PassResult(name="recognise_rope")
    explained: set[Node] = set()
    for anchor in calls(gm.graph, aten.cat.default):
        x = _rotated_half_of(anchor)
        if x is None:
            continue
        reason = _rewrite(gm, anchor, x, result, explained)
        if reason:
            result.refusals.append(
                Refusal(pattern=PATTERN, reason=reason, source_line=source_line(anchor), **describe(anchor))
            )
    for table in calls(gm.graph, aten.cos.default):
        for user in _table_users(table):
            if is_call(user, aten.mul.Tensor) and user not in explained:
                reason = "a product with a position's cosine that is not the half-split rotation"
                result.refusals.append(
                    Refusal(pattern=PATTERN, reason=reason, source_line=source_line(user), **describe(user))
                )
    recognise_complex_rope(gm, result)
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _rewrite(gm: GraphModule, half: Node, x: Node, result: PassResult, explained: set[Node]) -> str | None:
    """Replace the rotation around `half`; returns the reason if it is something else."""
    if len(half.users) != 1:
        return "the rotated half has several users"
    sin_product = next(iter(half.users))
    if not is_call(sin_product, aten.mul.Tensor) or len(sin_product.users) != 1:
        return "the rotated half is not multiplied by a sine"
    total = next(iter(sin_product.users))
    if not is_call(total, aten.add.Tensor) or total.kwargs:
        return "the rotated half is not added to x * cos"
    cos_product = total.args[1] if total.args[0] is sin_product else total.args[0]
    if not is_call(cos_product, aten.mul.Tensor) or x not in cos_product.args:
        return "the other term of the sum is not x * cos"
    cos = cos_product.args[1] if cos_product.args[0] is x else cos_product.args[0]
    sin = sin_product.args[1] if sin_product.args[0] is half else sin_product.args[0]
    if not is_call(_table_root(cos), aten.cos.default) or not is_call(_table_root(sin), aten.sin.default):
        return "the factors are not the cosine and the sine of positions"
    if _table_root(cos).args[0] is not _table_root(sin).args[0]:
        return "cosine and sine are taken of different angles"
    rope = insert_call(
        gm.graph, total, torch.ops.pagebinder.rope.default, (x, cos, sin), {"style": "half"}, value=val(total)
    )
    total.replace_all_uses_with(rope)
    explained.add(cos_product)
    result.matches.append(
        Match(pattern=PATTERN, detail=f"style=half, dim={val(x).shape[-1]}", **describe(rope))
    )
    return None


def _rotated_half_of(cat: Node) -> Node | None:
    """x, if cat is cat(-x[..., D/2:], x[..., :D/2]) over the last dimension."""
    parts = cat.args[0]
    if len(parts) != 2 or not is_call(parts[0], aten.neg.default):
        return None
    high, low = _half_of(parts[0].args[0]), _half_of(parts[1])
    if high is None or low is None or high[0] is not low[0] or (low[1], high[1]) != (0, 1):
        return None
    x = low[0]
    return x if arg(cat, 1, "dim", 0) in (-1, val(x).dim() - 1) else None


def _half_of(part) -> tuple[Node, int] | None:
    """(x, 0) for x[..., :D/2] and (x, 1) for x[..., D/2:], written as slice, chunk or split."""
    if is_call(part, aten.slice.Tensor):
        x, dim, start, end = part.args[0], part.args[1], part.args[2], arg(part, 3, "end", 1 << 62)
        width, last = val(x).shape[-1], val(x).dim() - 1
        if dim not in (-1, last) or not isinstance(width, int) or width % 2 or len(part.args) > 4:
            return None
        if (start, end) == (0, width // 2):
            return x, 0
        return (x, 1) if start == width // 2 and end >= width else None
    if is_call(part, operator.getitem) and is_call(part.args[0], aten.chunk.default, aten.split.Tensor):
        pieces = part.args[0]
        x, width = pieces.args[0], val(pieces.args[0]).shape[-1]
        size = pieces.args[1] if pieces.target is aten.split.Tensor else -(-width // pieces.args[1])
        if (
            not isinstance(width, int)
            or arg(pieces, 2, "dim", 0) not in (-1, val(x).dim() - 1)
            or 2 * size != width
        ):
            return None
        return x, part.args[1]
    return None


def _table_root(node):
    """Walk up from a cos or sin factor to the trigonometric function it came from."""
    while is_call(node, *_TABLE_STEPS) or _is_scaled(node):
        node = node.args[0]
    return node


def _is_scaled(node) -> bool:
    return is_call(node, aten.mul.Tensor) and isinstance(node.args[1], (int, float))


def _table_users(table: Node) -> list[Node]:
    """Nodes that use a cosine table after the casts, scalings and views that prepare it."""
    found, queue = [], [table]
    while queue:
        for user in queue.pop().users:
            if is_call(user, *_TABLE_STEPS) or _is_scaled(user):
                queue.append(user)
            else:
                found.append(user)
    return found
