"""RMSNorm, found from its root and walked outwards in both directions, casts skipped.

Matches:
    h = x.to(f32); r = rsqrt(mean(h ** 2, -1) + eps)          or ** -0.5, 1 / sqrt; h / sqrt(...) is h * r
    cast(h * r) * w | cast(h * r * w) | cast(h * r * (1 + w)) | cast(h * r)
Replaces with:
    pagebinder.rms_norm(x, w, eps=eps, tail="cast_scale" | "scale_cast" | "offset" | "none")

torch's own rms_norm (torch.nn.RMSNorm) is tail "scale_cast".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.recognise.norm_heads import (
    deviation_of,
    is_sum_with_literal,
    mean_over_last,
    squared_value,
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
    for call in calls(gm.graph, aten.rms_norm.default):
        _rewrite_torchs(gm, call, result)
    for anchor in [n for n in gm.graph.nodes if _is_anchor(n)]:
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
    if result.changed:
        finish(gm)
    return result


def _match_head(rsqrt: Node) -> _Head:
    """x, eps and h * r, from the rsqrt."""
    deviation = deviation_of(rsqrt)
    if deviation is None or not isinstance(rsqrt.args[0].args[1], float):
        raise _NotANorm("rsqrt is not taken of (mean + eps) with a literal eps")
    mean = deviation.variance
    if not is_call(mean, aten.mean.dim):
        raise _NotANorm("the value under rsqrt is not a mean")
    if mean.kwargs.get("dtype") is not None:
        raise _NotANorm("the mean changes the dtype")
    square = mean_over_last(mean)
    if square is None:
        raise _NotANorm("the mean is not over the last dimension with keepdim")
    if isinstance(val(square).shape[-1], torch.SymInt):
        raise _NotANorm("the mean is over the tokens")
    wide = squared_value(square)
    if wide is None:
        raise _NotANorm("the mean is not of a square")
    if val(wide).dtype is not torch.float32:
        raise _NotANorm(f"the norm is computed in {val(wide).dtype}, not in float32")
    if deviation.normed is None:
        raise _NotANorm("rsqrt is used in other places than x * rsqrt(...)")
    other = deviation.value
    if other not in (wide, _narrow(wide)) and not (
        isinstance(other, Node) and val(other).dtype is torch.float32 and _narrow(other) is _narrow(wide)
    ):
        raise _NotANorm("rsqrt multiplies something else than the value it was computed from")
    return _Head(x=_narrow(wide), eps=deviation.eps, normed=deviation.normed)


def _is_anchor(node: Node) -> bool:
    """Every rsqrt; another root only of a mean, since roots are taken of many things."""
    if is_call(node, aten.rsqrt.default):
        return True
    deviation = deviation_of(node)
    return deviation is not None and is_call(deviation.variance, aten.mean.dim)


def _rewrite_torchs(gm: GraphModule, call: Node, result: PassResult) -> None:
    """aten.rms_norm(x, shape, weight, eps), which computes in float32 and rounds once."""
    x, weight, eps = call.args[0], arg(call, 2, "weight"), arg(call, 3, "eps")
    plain = val(x).dtype in (torch.float32, torch.bfloat16, torch.float16)
    if len(call.args[1]) != 1 or not plain or (weight is not None and val(weight).dtype is not val(x).dtype):
        reason = "torch's rms_norm over several dimensions, or of mixed dtypes"
        result.refusals.append(
            Refusal(pattern=PATTERN, reason=reason, source_line=source_line(call), **describe(call))
        )
        return
    options = {"eps": torch.finfo(torch.float32).eps if eps is None else eps}
    options["tail"] = "none" if weight is None else "scale_cast"
    args = (x,) if weight is None else (x, weight)
    norm = insert_call(gm.graph, call, torch.ops.pagebinder.rms_norm.default, args, options, value=val(call))
    call.replace_all_uses_with(norm)
    detail = f"tail={options['tail']}, eps={options['eps']:g}"
    result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(norm)))


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
    if is_sum_with_literal(weight):
        if weight.args[1] != 1 or val(weight).dtype is not torch.float32:
            return None
        weight, form = weight.args[0], "offset"
    if skip_casts(weight).op != "get_attr" or list(val(weight).shape) != [width]:
        return None
    return users[0], weight, form
