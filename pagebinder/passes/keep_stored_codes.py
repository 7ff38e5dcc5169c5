"""Experts that a checkpoint stores in mxfp4 keep their codes (gpt-oss, DeepSeek-V4): a loader has expanded them.

Matches:
    moe_experts(x, ids, weights, up, down, ...)              of a module that was stored in mxfp4
Replaces with:
    moe_experts(x, ids, weights, dequantize_weight(codes, scale), dequantize_weight(codes, scale), ...)

Packing finds the codes again, and it is checked that they stand for the very numbers that were loaded: no number
changes. fuse_quantized_linear.py makes one op of it. Where they do not, or sizes cannot be packed, the experts stay
as they were loaded, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.linear.weight_formats import dequantize, size_problem
from pagebinder.custom_ops.linear.weight_stacks import dequantize_stack, matrices, quantize_stack, sizes_of
from pagebinder.graph_tools import attribute, calls, describe, finish, source_line
from pagebinder.passes.quantize_weights import (
    EXPERTS,
    certify_weights,
    packed_parts,
    read_from_codes,
    reason_against,
    weight_positions,
)
from pagebinder.report import Certificate, Match, PassResult, Refusal

FORMAT = "mxfp4"
PATTERN = "moe_experts"


def keep_stored_codes(gm: GraphModule, *, stored: Mapping[str, str]) -> PassResult:
    """`stored`: path of a module -> the format of its weights in the checkpoint."""
    result, made = PassResult(name="keep_stored_codes"), {}
    for node in calls(gm.graph, EXPERTS):
        if not all(_format_of(node.args[i], stored) == FORMAT for i in weight_positions(node)):
            continue
        packed: dict[int, tuple] = {}  # weight -> (codes, scale)
        reason = reason_against(node, FORMAT) or _pack(gm, node, packed)
        if reason:
            where = {"source_line": source_line(node), **describe(node)}
            result.refusals.append(Refusal(pattern=PATTERN, reason=reason, **where))
            continue
        read_from_codes(gm, node, FORMAT, made, lambda weight, *_, packed=packed: packed[id(weight)])
        result.matches.append(Match(pattern=PATTERN, detail=f"{FORMAT} as stored", **describe(node)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _format_of(weight: Node, stored: Mapping[str, str]) -> str | None:
    """Of a parameter of the model; None where a weight is computed, or was stored plain."""
    return stored.get(weight.target.rpartition(".")[0]) if weight.op == "get_attr" else None


def _pack(gm: GraphModule, node: Node, packed: dict[int, tuple]) -> str | None:
    """Fills `packed`; or why the weights are no numbers of the format."""
    transposed = node.kwargs.get("transposed", False)
    for position in weight_positions(node):
        weight = attribute(gm, node.args[position].target)
        packed[id(weight)] = codes, scale = packed_parts(weight, FORMAT, transposed)
        if weight.is_meta:
            continue
        for matrix, *parts in zip(matrices(weight.detach(), transposed), codes, scale, strict=True):
            if not torch.equal(dequantize(*parts, FORMAT), matrix.float()):
                return f"its weights are not numbers of {FORMAT}"
    return None


def certify_stored(before: GraphModule, after: GraphModule, result: PassResult) -> list[Certificate]:
    """That no number is another. Raises VerificationError: one is."""
    return certify_weights(before, after, result, bound=lambda weight, format: torch.zeros((), device="cpu"))


def round_as_stored(model: torch.nn.Module, stored: Mapping[str, str]) -> None:
    """Weights that were made at random become numbers of the format that the checkpoint's are of, in place."""
    for path, format in stored.items():
        module = model.get_submodule(path)
        transposed = getattr(module, "is_transposed", False)
        for weight in (p for p in module.parameters(recurse=False) if p.dim() == 3):
            if format != FORMAT or size_problem(*sizes_of(weight, transposed), FORMAT):
                continue
            values = dequantize_stack(*quantize_stack(weight.detach(), FORMAT, transposed), FORMAT)
            weight.data.copy_(values.mT if transposed else values)
