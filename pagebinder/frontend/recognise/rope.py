"""Rotary embedding in real numbers, found from the rotated value and walked outwards.

(The style written with complex numbers is in complex_rope.py, which this pass calls.)

Matches:
    x * cos + turned(x) * sin                turned: cat(-x[D/2:], x[:D/2]), or stack(-x[1::2], x[::2]).flatten;
                                             the other half negated turns the other way: sin becomes -sin
    cat(a * cos - b * sin, b * cos + a * sin)        or stack; a, b: halves of x, or even and odd channels
Replaces with:
    pagebinder.rope(x, cos, sin, style="half" | "every_two" | "chunked" | "interleaved" | "deinterleaved")

cos and sin: cosine and sine of positions, or tables of them looked up by position; cast, scaled, repeated, reshaped.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.recognise.complex_rope import recognise_complex_rope
from pagebinder.frontend.recognise.rope_parts import (
    factors_of,
    is_scaled,
    other_factor,
    part_of,
    reason_against_tables,
    table_users,
)
from pagebinder.graph_tools import (
    CASTS,
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
# (are the turned parts stacked?, where a and b come from) -> style
_STYLES_OF_PARTS = {
    (False, "low", "high"): "chunked",
    (True, "even", "odd"): "interleaved",
    (False, "even", "odd"): "deinterleaved",
}
_FLATTENS = (aten.flatten.using_ints, aten.reshape.default, aten.view.default, aten._unsafe_view.default)


@dataclass
class _Rotation:
    x: Node
    cos: Node
    sin: Node
    style: str
    output: Node
    products: tuple[Node, ...]
    turns_back: bool = False


class _NotARotation(Exception):
    """Why the walk from an anchor stopped."""


def recognise_rope(gm: GraphModule) -> PassResult:
    """Rewrite every rotation; refuse every other product with a position's cosine."""
    result = PassResult(name="recognise_rope")
    explained: set[Node] = set()
    for anchor in calls(gm.graph, aten.cat.default, aten.stack.default):
        try:
            rotation = _match(anchor)
        except _NotARotation as miss:
            where = describe(anchor)
            result.refusals.append(
                Refusal(pattern=PATTERN, reason=str(miss), source_line=source_line(anchor), **where)
            )
            continue
        if rotation is not None:
            result.matches.append(_rewrite(gm, rotation))
            explained |= set(rotation.products)
    for table in calls(gm.graph, aten.cos.default):
        for user in table_users(table):
            if is_call(user, aten.mul.Tensor) and user not in explained:
                reason = "a product with a position's cosine that is not the half-split rotation or another"
                result.refusals.append(
                    Refusal(pattern=PATTERN, reason=reason, source_line=source_line(user), **describe(user))
                )
    recognise_complex_rope(gm, result)
    result.changed = bool(result.matches)
    if result.changed:
        finish(gm)
    return result


def _rewrite(gm: GraphModule, rotation: _Rotation) -> Match:
    sin = rotation.sin
    if rotation.turns_back:
        sin = insert_call(gm.graph, rotation.output, aten.neg.default, (sin,))
    rope = insert_call(
        gm.graph,
        rotation.output,
        torch.ops.pagebinder.rope.default,
        (rotation.x, rotation.cos, sin),
        {"style": rotation.style},
        value=val(rotation.output),
    )
    rotation.output.replace_all_uses_with(rope)
    detail = f"style={rotation.style}, dim={val(rotation.x).shape[-1]}"
    return Match(pattern=PATTERN, detail=detail, **describe(rope))


def _match(anchor: Node) -> _Rotation | None:
    """The rotation around two joined parts; None: they are nothing of the kind."""
    parts = anchor.args[0]
    if len(parts) != 2 or not all(isinstance(p, Node) for p in parts) or not _joins_last(anchor):
        return None
    negated = [is_call(part, aten.neg.default) for part in parts]
    if negated.count(True) == 1:
        second, first = (part.args[0] if is_call(part, aten.neg.default) else part for part in parts)
        x = _turned_value(anchor, second, first)
        if x is None:
            return None
        rotation = _of_turned(_joined(anchor, x), x, _is_stack(anchor))
        return dataclasses.replace(rotation, turns_back=negated[1])
    if is_call(parts[0], aten.sub.Tensor) and is_call(parts[1], aten.add.Tensor):
        return _of_parts(anchor, *parts)
    return None


def _joins_last(anchor: Node) -> bool:
    rank = val(anchor).dim()
    return arg(anchor, 1, "dim", 0) in (-1, rank - 1)


def _is_stack(anchor: Node) -> bool:
    return is_call(anchor, aten.stack.default)


def _turned_value(anchor: Node, second: Node, first: Node) -> Node | None:
    """x, if the parts are its second and its first half (or its odd and even channels)."""
    kinds = ("odd", "even") if _is_stack(anchor) else ("high", "low")
    found = part_of(second), part_of(first)
    if None in found or found[0][0] is not found[1][0] or (found[0][1], found[1][1]) != kinds:
        return None
    return found[0][0]


def _joined(anchor: Node, x: Node) -> Node:
    """The node that has x's shape again: the cat itself, or what flattens the stack."""
    if not _is_stack(anchor):
        return anchor
    if len(anchor.users) != 1 or not is_call(output := next(iter(anchor.users)), *_FLATTENS):
        raise _NotARotation("the turned channels are not laid out as the value was")
    if [str(s) for s in val(output).shape] != [str(s) for s in val(x).shape]:
        raise _NotARotation("the turned channels are not laid out as the value was")
    return output


def _of_turned(turned: Node, x: Node, in_pairs: bool) -> _Rotation:
    """x * cos + turned * sin."""
    what = "rotated half" if not in_pairs else "rotated pairs"
    if len(turned.users) != 1:
        raise _NotARotation(f"the {what} has several users")
    if is_call(wider := next(iter(turned.users)), *CASTS) and _widened_from(wider) is _widened_from(turned):
        turned = wider  # signs and places are the same in more bits
        if len(turned.users) != 1:
            raise _NotARotation(f"the {what} has several users")
    sin_product = next(iter(turned.users))
    if not is_call(sin_product, aten.mul.Tensor) or len(sin_product.users) != 1:
        raise _NotARotation(f"the {what} is not multiplied by a sine")
    total = next(iter(sin_product.users))
    if not is_call(total, aten.add.Tensor) or total.kwargs:
        raise _NotARotation(f"the {what} is not added to x * cos")
    cos_product = total.args[1] if total.args[0] is sin_product else total.args[0]
    x = _same_in(cos_product, x, val(turned).dtype) if is_call(cos_product, aten.mul.Tensor) else None
    if x is None:
        raise _NotARotation("the other term of the sum is not x * cos")
    cos, sin = other_factor(cos_product, x), other_factor(sin_product, turned)
    _require_tables(cos, sin)
    style = "every_two" if in_pairs else "half"
    return _Rotation(x, cos, sin, style, total, (cos_product, sin_product))


def _widened_from(node: Node) -> Node:
    """What a value was before casts that lose nothing."""
    while is_call(node, *CASTS) and isinstance(node.args[0], Node):
        before, now = val(node.args[0]).dtype, val(node).dtype
        if torch.promote_types(before, now) is not now:
            break
        node = node.args[0]
    return node


def _same_in(product: Node, x: Node, dtype: torch.dtype) -> Node | None:
    """The factor that is x in this dtype, x itself rather than another cast of what it is made of."""
    same = [
        factor
        for factor in product.args[:2]
        if isinstance(factor, Node)
        and _widened_from(factor) is _widened_from(x)
        and val(factor).dtype is dtype
    ]
    return x if x in same else same[0] if same else None


def _of_parts(anchor: Node, first: Node, second: Node) -> _Rotation | None:
    """first = a * cos - b * sin, second = b * cos + a * sin (or a * sin + b * cos)."""
    products = [*first.args[:2], *second.args[:2]]
    if not all(is_call(p, aten.mul.Tensor) for p in products) or any(is_scaled(p) for p in products):
        return None
    minuend, subtrahend = (factors_of(p) for p in first.args[:2])
    if minuend is None or subtrahend is None:
        return None
    (x, a_kind, a, cos), (x_of_b, b_kind, b, sin) = minuend, subtrahend
    style = _STYLES_OF_PARTS.get((_is_stack(anchor), a_kind, b_kind))
    if x is not x_of_b or style is None:
        return None
    if first.kwargs or second.kwargs:
        raise _NotARotation("the products are added with a factor")
    wanted = [{a, sin}, {b, cos}]
    if [set(p.args) for p in second.args[:2]] not in (wanted, wanted[::-1]):
        raise _NotARotation("the second part is not b * cos + a * sin")
    _require_tables(cos, sin)
    if val(cos).shape[-1] != val(a).shape[-1] or str(val(first).shape) != str(val(a).shape):
        raise _NotARotation("the tables do not have one column per pair")
    return _Rotation(x, cos, sin, style, _joined(anchor, x), tuple(products))


def _require_tables(cos, sin) -> None:
    if reason := reason_against_tables(cos, sin):
        raise _NotARotation(reason)
