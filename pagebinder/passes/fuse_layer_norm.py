"""LayerNorm over the last dimension, and the residual add before it, in one op.

Matches:
    y = layer_norm(x, [C], weight, bias, eps)
    h = x + residual;  y = layer_norm(h, [C], weight, bias, eps)            h may have other users
Replaces with:
    y = layer_norm(x, weight, bias, eps)
    y, h = add_layer_norm(x, residual, weight, bias, eps)

On a CPU: elsewhere a compiler fuses torch's own with what stands around it. A norm over several dimensions stays with
torch.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.graph_tools import arg, aten, calls, describe, finish, insert_call, source_line, val
from pagebinder.passes.fuse_add_rms_norm import reason_against, with_sum
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "layer_norm"


def fuse_layer_norm(gm: GraphModule) -> PassResult:
    """Rewrite every LayerNorm over one dimension; the others are refused."""
    result, ours = PassResult(name="fuse_layer_norm"), torch.ops.pagebinder
    for norm in calls(gm.graph, aten.layer_norm.default):
        if len(norm.args[1]) != 1:
            reason = f"it normalises {len(norm.args[1])} dimensions together"
            where = {"source_line": source_line(norm), **describe(norm)}
            result.refusals.append(Refusal(pattern=PATTERN, reason=reason, **where))
            continue
        args = (norm.args[0], arg(norm, 2, "weight"), arg(norm, 3, "bias"))
        options = {"eps": float(arg(norm, 4, "eps", 1e-5))}
        plain = insert_call(gm.graph, norm, ours.layer_norm.default, args, options, value=val(norm))
        norm.replace_all_uses_with(plain)
        gm.graph.erase_node(norm)
        with_residual = reason_against(plain) is None
        normed = with_sum(gm, plain, ours.add_layer_norm.default) if with_residual else plain
        detail = "of a sum" if with_residual else ""
        result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(normed)))
    result.changed = bool(result.matches)
    finish(gm)
    return result
