"""A linear layer reads its weight as codes: no weight of 16 bits is made.

Matches:
    linear(x, dequantize_weight(codes, scale, format=f), b)
Replaces with:
    pagebinder.quantized_linear(x, codes, scale, b, format=f)

Same numbers, but for the rounding of the weight to its dtype, which is left out.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from pagebinder.graph_tools import arg, calls, describe, finish, insert_call, is_call, val
from pagebinder.passes.quantize_weights import LINEARS
from pagebinder.report import Match, PassResult

PATTERN = "quantized_linear"
ours = torch.ops.pagebinder


def fuse_quantized_linear(gm: GraphModule) -> PassResult:
    """Fuse every pair; nothing that quantize_weights makes is refused."""
    result = PassResult(name="fuse_quantized_linear")
    for node in calls(gm.graph, *LINEARS):
        if not is_call(node.args[1], ours.dequantize_weight.default):
            continue
        weight = node.args[1]
        args, options = (node.args[0], *weight.args), {"format": weight.kwargs["format"]}
        if (bias := arg(node, 2, "bias")) is not None:
            args += (bias,)
        fused = insert_call(gm.graph, node, ours.quantized_linear.default, args, options, value=val(node))
        node.replace_all_uses_with(fused)
        gm.graph.erase_node(node)
        result.matches.append(Match(pattern=PATTERN, **describe(fused)))
    result.changed = bool(result.matches)
    finish(gm)
    return result
