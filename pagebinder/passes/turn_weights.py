"""Products with a parameter [K, N] become linear layers, whose weights are [N, K]: GPT-2 writes its layers so.

Matches:
    addmm(b, x [.., K], W) | mm(x, W) | matmul(x, W)        W a parameter [K, N], b one [N], K and N multiples of 32
Replaces with:
    linear(x, W', b)                                        W' [N, K], made once, beside W

On a CPU: kernels of linear layers read rows of a weight, and torch's product of bf16 with such a matrix takes tens of
times as long where the processor has no instructions for it. A GPU's library takes either.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import (
    aten,
    calls,
    describe,
    finish,
    insert_call,
    insert_derived,
    source_line,
    val,
)
from pagebinder.passes.place_linears import GRAIN
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "turned_weight"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def turned(weight: torch.Tensor) -> torch.Tensor:
    """[K, N] -> [N, K]."""
    return weight.T.contiguous()


def turn_weights(gm: GraphModule) -> PassResult:
    """Rewrite every product with a parameter on its right; those whose sizes no kernel takes are refused."""
    result = PassResult(name="turn_weights")
    turned_of: dict[str, Node] = {}
    for node in calls(gm.graph, aten.addmm.default, aten.mm.default, aten.matmul.default):
        bias, x, weight = node.args if len(node.args) == 3 else (None, *node.args)
        if not _are_parameters(weight, bias) or val(weight).device.type == "cuda":
            continue
        reason = _reason_against(node, x, weight, bias)
        if reason is not None:
            where = {"source_line": source_line(node), **describe(node)}
            result.refusals.append(Refusal(pattern=PATTERN, reason=reason, **where))
            continue
        if weight.target not in turned_of:
            name = f"{weight.target.replace('.', '_')}_turned"
            turned_of[weight.target] = insert_derived(gm, node, name, turned, [weight])
        operands = (x, turned_of[weight.target], *(() if bias is None else (bias,)))
        linear = insert_call(gm.graph, node, aten.linear.default, operands, value=val(node))
        node.replace_all_uses_with(linear)
        gm.graph.erase_node(node)
        result.matches.append(Match(pattern=PATTERN, **describe(linear)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _are_parameters(weight: Node, bias: Node | None) -> bool:
    is_weight = weight.op == "get_attr" and val(weight).dim() == 2
    return is_weight and (bias is None or (bias.op == "get_attr" and val(bias).dim() == 1))


def _reason_against(node: Node, x: Node, weight: Node, bias: Node | None) -> str | None:
    if set(node.kwargs.values()) - {1}:
        return "the product or its bias has a factor"
    sizes = tuple(val(weight).shape)
    if any(size % GRAIN for size in sizes):
        return f"the weight's sizes {sizes} are not multiples of {GRAIN}"
    dtypes = {val(n).dtype for n in (x, weight, bias) if n is not None}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return "it is not all bfloat16, all float32 or all float16"
    if bias is not None and val(bias).shape[0] != sizes[1]:
        return "the bias is broadcast"
    return None
