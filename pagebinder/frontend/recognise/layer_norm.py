"""LayerNorm written out -> torch's layer_norm (Ba et al., 2016).

Matches:
    c = x - mean(x, -1);  y = c * rsqrt(mean(c ** 2, -1) + eps) | c / sqrt(var + eps);  y * w + b
    var: mean(c ** 2) or x.var(-1, unbiased=False)
Replaces with:
    aten.layer_norm(x, [C], w, b, eps)       in float32 as the source computes it
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.recognise.norm_heads import (
    deviation_of,
    mean_over_last,
    squared_value,
    weight_product,
)
from pagebinder.graph_tools import arg, aten, describe, finish, insert_call, is_call, source_line, val
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "layer_norm"


class _NotALayerNorm(Exception):
    """Why the walk from an anchor stopped."""


def recognise_layer_norm(gm: GraphModule) -> PassResult:
    """Rewrite every centred norm; what is normalised without being centred is left to recognise_rms_norm."""
    result = PassResult(name="recognise_layer_norm")
    for anchor in list(gm.graph.nodes):
        deviation = deviation_of(anchor)
        centred = _centred_of(deviation.variance) if deviation is not None else None
        if centred is None:
            continue
        try:
            norm = _rewrite(gm, deviation, *centred)
        except _NotALayerNorm as miss:
            where = describe(anchor)
            result.refusals.append(
                Refusal(pattern=PATTERN, reason=str(miss), source_line=source_line(anchor), **where)
            )
            continue
        result.matches.append(Match(pattern=PATTERN, detail=f"eps={deviation.eps:g}", **describe(norm)))
    result.changed = bool(result.matches)
    if result.changed:
        finish(gm)
    return result


def _centred_of(variance: Node) -> tuple[Node, Node | None] | None:
    """(x, x - mean(x) if it is a node of the variance) of a variance over the last dimension; None: not one."""
    if is_call(variance, aten.var.correction, aten.var.dim):
        x, dims = variance.args[0], list(arg(variance, 1, "dim") or ())
        if is_call(variance, aten.var.dim):
            biased, keeps = not arg(variance, 2, "unbiased", True), arg(variance, 3, "keepdim", False)
        else:
            biased, keeps = variance.kwargs.get("correction") == 0, variance.kwargs.get("keepdim")
        return (x, None) if dims in ([-1], [val(x).dim() - 1]) and biased and keeps else None
    centred = squared_value(mean_over_last(variance))
    if not is_call(centred, aten.sub.Tensor) or centred.kwargs:
        return None
    x, mean = centred.args[:2]
    return (x, centred) if mean_over_last(mean) is x else None


def _rewrite(gm: GraphModule, deviation, x: Node, centred: Node | None) -> Node:
    width = val(x).shape[-1]
    if isinstance(width, torch.SymInt):
        raise _NotALayerNorm("the mean is over the tokens")
    if val(x).dtype is not torch.float32:
        raise _NotALayerNorm(f"the norm is computed in {val(x).dtype}, not in float32")
    if deviation.normed is None:
        raise _NotALayerNorm("the deviation is used in other places than one quotient")
    value = deviation.value
    same = value is centred or (
        is_call(value, aten.sub.Tensor) and not value.kwargs
        and value.args[0] is x and mean_over_last(value.args[1]) is x
    )  # fmt: skip
    if not same:
        raise _NotALayerNorm("the deviation divides something else than the centred value")
    output, weight, bias = deviation.normed, None, None
    if (scaled := weight_product(output, width)) is not None:
        output, weight = scaled
        if (shifted := weight_product(output, width, aten.add.Tensor)) is not None:
            output, bias = shifted
    args = (x, [width], weight, bias, deviation.eps)
    norm = insert_call(gm.graph, output, aten.layer_norm.default, args, value=val(output))
    output.replace_all_uses_with(norm)
    return norm
