"""The first half of a gated MLP in one op: both linear layers and the gate.

Matches:
    g = linear(x, Wg, bg);  u = linear(x, Wu, bu)               ops of ours, read by nothing else
    y = gated_activation(g, u, activation)
    g = quantized_linear(x, *Wg, bg); u = quantized_linear(x, *Wu, bu)      W: codes and scale, of one format
Replaces with:
    y = gated_linear(x, Wg, Wu, bg, bu, activation)             or quantized_gated_linear(x, *Wg, *Wu, bg, bu, ...)

The op rounds where the three round, so its result has their bits (a gate by exact GELU may differ in the last one).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import calls, describe, finish, insert_call, source_line, val
from pagebinder.passes.linear_calls import linear_call, reason_against_joining
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "gated_linear"


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
        g, u = linear_call(gate), linear_call(up)
        operands = (g.x, *g.weight, *u.weight, g.bias, u.bias)
        options = {**node.kwargs, **g.options}
        fused = insert_call(gm.graph, node, g.joined_op(PATTERN), operands, options, value=val(node))
        node.replace_all_uses_with(fused)
        for old in (node, gate, up):
            gm.graph.erase_node(old)
        result.matches.append(Match(pattern=PATTERN, **describe(fused)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _reason_against(gate: Node, up: Node) -> str | None:
    g, u = linear_call(gate), linear_call(up)
    if g is None or u is None:
        return "gate and up are not two linear layers of ours"
    if gate is up or g.x is not u.x:
        return "gate and up do not read the same value through two layers"
    if len(gate.users) > 1 or len(up.users) > 1:
        return "the gate or the other half is read elsewhere, too"
    if g.format != u.format:
        return f"the two weights have different formats: {g.format or 'plain'} and {u.format or 'plain'}"
    if val(g.weight[0]).shape != val(u.weight[0]).shape:
        return "the two weights have different shapes"
    if g.format is not None and val(g.x).dtype == torch.float16:
        return "kernels of quantised gated layers take bfloat16 and float32"
    return reason_against_joining(g, PATTERN)
