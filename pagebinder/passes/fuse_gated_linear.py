"""The first half of a gated MLP in one op: both linear layers and the gate.

Matches:
    g = linear(x, Wg, bg);  u = linear(x, Wu, bu)               ops of ours, read by nothing else
    y = gated_activation(g, u, activation)
Replaces with:
    y = gated_linear(x, Wg, Wu, bg, bu, activation)

The op rounds where the three round, so its result has their bits (a gate by exact GELU may differ in the last one).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import arg, calls, describe, finish, insert_call, is_call, source_line, val
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "gated_linear"
LINEAR = torch.ops.pagebinder.linear.default


def fuse_gated_linear(gm: GraphModule) -> PassResult:
    """Rewrite every gate of two linear layers of ours; a gate of something else is refused with what was found."""
    result = PassResult(name="fuse_gated_linear")
    for node in calls(gm.graph, torch.ops.pagebinder.gated_activation.default):
        gate, up = node.args[:2]
        reason = _reason_against(gate, up)
        if reason:
            where = {"source_line": source_line(node), **describe(node)}
            result.refusals.append(Refusal(pattern=PATTERN, reason=reason, **where))
            continue
        operands = (gate.args[0], gate.args[1], up.args[1], arg(gate, 2, "bias"), arg(up, 2, "bias"))
        op = torch.ops.pagebinder.gated_linear.default
        fused = insert_call(gm.graph, node, op, operands, dict(node.kwargs), value=val(node))
        node.replace_all_uses_with(fused)
        for old in (node, gate, up):
            gm.graph.erase_node(old)
        result.matches.append(Match(pattern=PATTERN, **describe(fused)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _reason_against(gate: Node, up: Node) -> str | None:
    if not is_call(gate, LINEAR) or not is_call(up, LINEAR):
        return "gate and up are not two linear layers of ours"
    if gate is up or gate.args[0] is not up.args[0]:
        return "gate and up do not read the same value through two layers"
    if len(gate.users) > 1 or len(up.users) > 1:
        return "the gate or the other half is read elsewhere, too"
    if val(gate.args[1]).shape != val(up.args[1]).shape:
        return "the two weights have different shapes"
    return None
