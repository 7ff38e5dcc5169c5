"""Residual add + RMSNorm in one op that returns both the normalised value and the sum.

Matches:
    h = x + residual;  y = rms_norm(h, w, eps, tail)            h may have other users
Replaces with:
    y, h = add_rms_norm(x, residual, w, eps, tail)
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import aten, calls, describe, finish, insert_call, is_call, source_line, val
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "add_rms_norm"


def fuse_add_rms_norm(gm: GraphModule) -> PassResult:
    """Rewrite every RMSNorm of a sum; a norm of something else is refused with what was found."""
    result = PassResult(name="fuse_add_rms_norm")
    for norm in calls(gm.graph, torch.ops.pagebinder.rms_norm.default):
        reason = reason_against(norm)
        if reason:
            result.refusals.append(
                Refusal(pattern=PATTERN, reason=reason, source_line=source_line(norm), **describe(norm))
            )
            continue
        normed = with_sum(gm, norm, torch.ops.pagebinder.add_rms_norm.default)
        result.matches.append(Match(pattern=PATTERN, **describe(normed)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def with_sum(gm: GraphModule, norm: Node, op: torch._ops.OpOverload) -> Node:
    """The norm and the sum that it normalises as one call of `op`; returns the norm's result."""
    total = norm.args[0]
    for weight in norm.args[1:]:  # a constant that a pass put in before the norm
        if isinstance(weight, Node) and total < weight:
            total.prepend(weight)
    args = (*total.args, *norm.args[1:])
    fused = insert_call(gm.graph, total, op, args, norm.kwargs, value=(val(norm), val(total)))
    normed = insert_call(gm.graph, total, operator.getitem, (fused, 0), value=val(norm))
    summed = insert_call(gm.graph, total, operator.getitem, (fused, 1), value=val(total))
    for node in (fused, normed):
        node.meta.update({k: norm.meta[k] for k in ("nn_module_stack", "stack_trace") if k in norm.meta})
    norm.replace_all_uses_with(normed)
    gm.graph.erase_node(norm)
    total.replace_all_uses_with(summed)
    gm.graph.erase_node(total)
    return normed


def reason_against(norm: Node) -> str | None:
    """Why a norm and the sum that it normalises are not one op; None: they can be."""
    total = norm.args[0]
    if not is_call(total, aten.add.Tensor):
        return "the normalised value is not a sum"
    if total.kwargs or not all(isinstance(a, Node) for a in total.args):
        return "the sum has a factor or a literal"
    if any(isinstance(w, Node) and w.op != "get_attr" for w in norm.args[1:]):
        return "the weight is computed, and may come after the sum"
    a, b = total.args
    if val(a).shape != val(b).shape or val(a).dtype != val(b).dtype:
        return "the two terms differ in shape or dtype"
    norms = [u for u in total.users if is_call(u, norm.target)]
    if len(norms) > 1:
        return "the sum is normalised more than once"
    return None
