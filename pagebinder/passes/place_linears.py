"""Linear layers that a kernel of ours can serve become an op of ours.

Matches:
    aten.linear(x [..., K], W [N, K], b)        bf16, float32 or float16 on the CPU, bf16 or float16 on a GPU; W a
                                                parameter, N and K multiples of 32
Replaces with:
    pagebinder.linear(x, W, b)                  same arguments; a provider is chosen for it afterwards

Decodes and short prefill chunks are bound by reading weights, and torch's bf16 linear brings a weight into another
order on every call; in float32 it is slow at 3 to 8 rows, in float16, and in bf16 without AVX-512, at any number.
The `cpu` kernels read a weight as it lies, so there is one copy of it in memory. Results differ from torch's in the
order of summation only. In bf16 that does not depend on the number of rows up to 128 on matrix tiles (AMX), from 5
on elsewhere on x86; in float32 torch takes over at 9 rows.

On a GPU the `triton` kernels serve few rows, and the library's product the others (triton/linear.py).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.providers import AUTO_ORDER, OpNeed, registered_providers
from pagebinder.graph_tools import arg, aten, calls, describe, dtype_name, finish, source_line, val
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "linear"
GRAIN = 32  # the kernel's LINEAR_GRAIN


def place_linears(gm: GraphModule) -> PassResult:
    """Retarget every suitable linear layer; the others stay with torch and are refused with the reason."""
    result = PassResult(name="place_linears")
    for node in calls(gm.graph, aten.linear.default):
        reason = _reason_against(node)
        if reason:
            where = {"source_line": source_line(node), **describe(node)}
            result.refusals.append(Refusal(pattern=PATTERN, reason=reason, **where))
            continue
        node.target = torch.ops.pagebinder.linear.default
        result.matches.append(Match(pattern=PATTERN, **describe(node)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _reason_against(node: Node) -> str | None:
    weight, bias = node.args[1], arg(node, 2, "bias")
    if weight.op != "get_attr" or (bias is not None and bias.op != "get_attr"):
        return "the weight or the bias is computed"
    if val(weight).dim() != 2:
        return "the weight is not [N, K]"
    sizes = tuple(val(weight).shape)
    if any(size % GRAIN for size in sizes):
        return f"the weight's sizes {sizes} are not multiples of {GRAIN}"
    dtypes = {val(n).dtype for n in (node.args[0], weight, bias) if n is not None}
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float32, torch.float16}:
        return "it is not all bfloat16, all float32 or all float16"
    device = val(weight).device.type
    need = OpNeed(op="linear", device="cpu" if device == "meta" else device, dtype=dtype_name(val(weight)))
    first, *_ = AUTO_ORDER.get(need.device, AUTO_ORDER["cpu"])
    reasons = registered_providers()[first].reasons_against(need)
    return f"no kernel of ours: {'; '.join(reasons)}" if reasons else None
