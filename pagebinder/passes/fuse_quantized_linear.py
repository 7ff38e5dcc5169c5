"""Linear layers and experts read their weights as codes: no weight of 16 bits is made.

Matches:
    linear(x, dequantize_weight(codes, scale, format=f), b)
    moe_experts(x, ids, weights, dequantize_weight(...), dequantize_weight(...), ...)
Replaces with:
    pagebinder.quantized_linear(x, codes, scale, b, format=f)
    pagebinder.quantized_moe_experts(x, ids, weights, codes, scale, codes, scale, ..., format=f or "f/g")

Same numbers, but for the rounding of the weight to its dtype, which is left out.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.linear.weight_formats import format_of_both
from pagebinder.graph_tools import arg, calls, describe, finish, insert_call, is_call, val
from pagebinder.passes.quantize_weights import EXPERTS, LINEARS
from pagebinder.report import Match, PassResult

ours = torch.ops.pagebinder


def fuse_quantized_linear(gm: GraphModule) -> PassResult:
    """Fuse every pair; nothing that quantize_weights makes is refused."""
    result = PassResult(name="fuse_quantized_linear")
    for node in calls(gm.graph, *LINEARS, EXPERTS):
        is_experts = node.target is EXPERTS
        if not is_call(node.args[3 if is_experts else 1], ours.dequantize_weight.default):
            continue
        target, args, options = _experts(node) if is_experts else _linear(node)
        fused = insert_call(gm.graph, node, target, args, options, value=val(node))
        node.replace_all_uses_with(fused)
        gm.graph.erase_node(node)
        result.matches.append(Match(pattern=target._opname, **describe(fused)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _linear(node: Node) -> tuple:
    weight = node.args[1]
    args, options = (node.args[0], *weight.args), {"format": weight.kwargs["format"]}
    if (bias := arg(node, 2, "bias")) is not None:
        args += (bias,)
    return ours.quantized_linear.default, args, options


def _experts(node: Node) -> tuple:
    """Both stacks are codes or none is, and none of them is transposed."""
    up, down = node.args[3:5]
    args = (*node.args[:3], *up.args, *down.args, *node.args[5:])
    options = {name: value for name, value in node.kwargs.items() if name != "transposed"}
    return (
        ours.quantized_moe_experts.default,
        args,
        {**options, "format": format_of_both(up.kwargs["format"], down.kwargs["format"])},
    )
