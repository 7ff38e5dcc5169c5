"""The router of a mixture and its experts in one op, from the router's logits on.

Matches:
    scores = softmax(logits) | sigmoid(logits);  ids = topk(scores + bias, inside the best groups)
    w = scores[ids] / sum | softmax(...), * scale
    out = moe_experts(x, ids, w, up, down, ...)                 see `router_pattern.py` for what may be left out
Replaces with:
    out = moe_routed_experts(x, logits, bias, up, down, ..., the router as options)
    (quantized_moe_experts with quantized_moe_routed_experts)

The same experts, ties as torch.topk decides them, with weights of the same bits.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.graph_tools import calls, describe, dtype_name, finish, insert_call, source_line, val
from pagebinder.passes.router_pattern import NotThisRouter, RoutedSite, routed_site
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "moe_routed_experts"
ours = torch.ops.pagebinder
ROUTED = {
    ours.moe_experts.default: ours.moe_routed_experts.default,
    ours.quantized_moe_experts.default: ours.quantized_moe_routed_experts.default,
}


def fuse_moe_routing(gm: GraphModule, *, requested: Collection[str] = ()) -> PassResult:
    """Rewrite every mixture whose router is understood; the others are refused with what was found.

    Args:
        requested: ops for which a provider was asked for; those of experts stay as they are then.
    """
    result = PassResult(name="fuse_moe_routing")
    for node in calls(gm.graph, *ROUTED):
        try:
            site = routed_site(*node.args[1:3])
            if reason := _reason_against(node, site, requested):
                raise NotThisRouter(reason)
        except NotThisRouter as reason:
            where = {"source_line": source_line(node), **describe(node)}
            result.refusals.append(Refusal(pattern=PATTERN, reason=str(reason), **where))
            continue
        operands = (node.args[0], site.logits, site.bias, *node.args[3:])
        options = site.router.as_options() | dict(node.kwargs)
        fused = insert_call(gm.graph, node, ROUTED[node.target], operands, options, value=val(node))
        node.replace_all_uses_with(fused)
        gm.graph.erase_node(node)
        result.matches.append(Match(pattern=PATTERN, detail=str(site.router), **describe(fused)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _reason_against(node: Node, site: RoutedSite, requested: Collection[str]) -> str | None:
    if val(site.logits).shape[1] != val(node.args[3]).shape[0]:
        return "it chooses among more than the experts that it has weights of"
    name = node.target._opname
    if name in requested:
        return f"a provider was asked for {name}"
    device = val(node).device.type
    need = OpNeed(
        op=ROUTED[node.target]._opname,
        device="cpu" if device == "meta" else device,
        dtype=dtype_name(val(node)),
    )
    reasons = registered_providers()["cpu"].reasons_against(need)
    return f"no kernel of ours: {'; '.join(reasons)}" if reasons else None
