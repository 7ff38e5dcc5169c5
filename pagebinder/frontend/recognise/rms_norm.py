"""RMSNorm, found from its `rsqrt` and walked outwards in both directions, casts skipped.

Matches:
    h = x.to(f32); r = rsqrt(mean(h ** 2, -1) + eps)
    cast(h * r) * w | cast(h * r * w) | cast(h * r * (1 + w)) | cast(h * r)
Replaces with:
    pagebinder.rms_norm(x, w, eps=eps, tail="cast_scale" | "scale_cast" | "offset" | "none")
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import (
    CASTS,
    aten,
    calls,
    describe,
    finish,
    insert_call,
    is_call,
    skip_casts,
    source_line,
    val,
)
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "rms_norm"


class _NotANorm(Exception):
    """Why the walk from an anchor stopped."""


@dataclass
class _Head:
    x: Node
    eps: float
    normed: Node


@dataclass
class _Tail:
    kind: str
    weight: Node | None
    output: Node


def recognise_rms_norm(gm: GraphModule) -> PassResult:
    """Rewrite every RMSNorm of the captured graph; refuse every other use of rsqrt with the reason."""
    result = PassResult(name="recognise_rms_norm")
    for anchor in calls(gm.graph, aten.rsqrt.default):
        try:
            head = _match_head(anchor)
            tail = _match_tail(head)
        except _NotANorm as miss:
            result.refusals.append(
                Refusal(
                    pattern=PATTERN, reason=str(miss), source_line=source_line(anchor), **describe(anchor)
                )
            )
            continue
        args = (head.x,) if tail.weight is None else (head.x, tail.weight)
        norm = insert_call(
            gm.graph,
            tail.output,
            torch.ops.pagebinder.rms_norm.default,
            args,
            {"eps": head.eps, "tail": tail.kind},
            value=val(tail.output),
        )
        norm.meta.update({k: anchor.meta[k] for k in ("nn_module_stack", "stack_trace") if k in anchor.meta})
        tail.output.replace_all_uses_with(norm)
        detail = f"tail={tail.kind}, eps={head.eps:g}"
        result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(norm)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _match_head(rsqrt: Node) -> _Head:
    """x, eps and h * r, from the rsqrt."""
    add = rsqrt.args[0]
    if not _is_sum_with_literal(add) or not isinstance(add.args[1], float):
        raise _NotANorm("rsqrt is not taken of (mean + eps) with a literal eps")
    mean = add.args[0]
    if not is_call(mean, aten.mean.dim):
        raise _NotANorm("the value under rsqrt is not a mean")
    if mean.kwargs.get("dtype") is not None:
        raise _NotANorm("the mean changes the dtype")
    square = mean.args[0]
    last = val(square).dim() - 1 if isinstance(square, Node) else -1
    if list(mean.args[1]) not in ([-1], [last]) or not (len(mean.args) > 2 and mean.args[2]):
        raise _NotANorm("the mean is not over the last dimension with keepdim")
    if isinstance(val(square).shape[-1], torch.SymInt):
        raise _NotANorm("the mean is over the tokens")
    wide = _squared(square)
    if wide is None:
        raise _NotANorm("the mean is not of a square")
    if val(wide).dtype is not torch.float32:
        raise _NotANorm(f"the norm is computed in {val(wide).dtype}, not in float32")
    products = [u for u in rsqrt.users if is_call(u, aten.mul.Tensor)]
    if len(products) != 1 or len(rsqrt.users) != 1:
        raise _NotANorm("rsqrt is used in other places than x * rsqrt(...)")
    other = _other_operand(products[0], rsqrt)
    if other not in (wide, _narrow(wide)) and not (
        isinstance(other, Node) and val(other).dtype is torch.float32 and _narrow(other) is _narrow(wide)
    ):
        raise _NotANorm("rsqrt multiplies something else than the value it was computed from")
    return _Head(x=_narrow(wide), eps=add.args[1], normed=products[0])


def _match_tail(head: _Head) -> _Tail:
    """What follows h * r: the cast and the weight, in the order that the model has them."""
    width, dtype = val(head.x).shape[-1], val(head.x).dtype
    cast = _follow_cast(head.normed, dtype)
    after_cast = _scaled_by_weight(cast, width) if cast is not None else None
    if after_cast is not None and after_cast[2] == "plain":
        return _Tail("cast_scale", after_cast[1], after_cast[0])
    scaled = _scaled_by_weight(head.normed, width)
    if scaled is not None:
        product, weight, form = scaled
        output = _follow_cast(product, dtype)
        if output is None and val(product).dtype is dtype:
            output = product
        if output is None:
            raise _NotANorm("the weighted norm is not cast back to the input's dtype")
        # The op widens the weight by itself, and widening is exact.
        widened = is_call(weight, *CASTS) and val(weight).dtype is torch.float32
        weight = _narrow(weight) if widened and val(_narrow(weight)).dtype.itemsize <= 4 else weight
        return _Tail("offset" if form == "offset" else "scale_cast", weight, output)
    output = cast if cast is not None else head.normed
    if val(output).dtype is not dtype:
        raise _NotANorm(f"the norm of a {dtype} value stays {val(output).dtype}")
    return _Tail("none", None, output)


def _squared(node) -> Node | None:
    if is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 2:
        return node.args[0]
    if is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]:
        return node.args[0]
    if is_call(node, aten.square.default):
        return node.args[0]
    return None


def _is_sum_with_literal(node) -> bool:
    """a + literal, without a factor."""
    plain = is_call(node, aten.add.Tensor, aten.add.Scalar) and not node.kwargs and len(node.args) == 2
    return plain and isinstance(node.args[1], (int, float))


def _narrow(wide: Node) -> Node:
    """The value before its cast to float32 (one cast only: an earlier one belongs to the model)."""
    return wide.args[0] if is_call(wide, *CASTS) else wide


def _other_operand(product: Node, one: Node) -> Node:
    return product.args[1] if product.args[0] is one else product.args[0]


def _follow_cast(node: Node, dtype: torch.dtype) -> Node | None:
    """The only user, if it is a cast to `dtype`."""
    users = list(node.users)
    return (
        users[0] if len(users) == 1 and is_call(users[0], *CASTS) and val(users[0]).dtype is dtype else None
    )


def _scaled_by_weight(node: Node, width) -> tuple[Node, Node, str] | None:
    """(product, weight, "plain" or "offset") if the only user multiplies by a parameter [C] or by 1 + it.

    The weight is returned with its casts: they may round, and are part of the contract.
    """
    users = list(node.users)
    if len(users) != 1 or not is_call(users[0], aten.mul.Tensor):
        return None
    operand = _other_operand(users[0], node)
    if not isinstance(operand, Node):
        return None
    weight, form = operand, "plain"
    if _is_sum_with_literal(weight):
        if weight.args[1] != 1 or val(weight).dtype is not torch.float32:
            return None
        weight, form = weight.args[0], "offset"
    if skip_casts(weight).op != "get_attr" or list(val(weight).shape) != [width]:
        return None
    return users[0], weight, form
