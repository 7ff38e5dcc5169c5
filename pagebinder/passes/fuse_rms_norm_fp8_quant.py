"""RMSNorm, with the residual add before it, and the FP8 quantisation of its result in one op.

Matches:
    y = rms_norm(x, w, eps, tail)                             y read by nothing else
    codes, s = scaled_fp8_quant(y, static, granularity)
Replaces with:
    codes, s = rms_norm_fp8_quant(x, w, static, eps, tail, granularity)

Matches:
    y, h = add_rms_norm(x, residual, w, eps, tail);  codes, s = scaled_fp8_quant(y, static, granularity)
Replaces with:
    codes, s, h = add_rms_norm_fp8_quant(x, residual, w, static, eps, tail, granularity)

The normalised value is never stored. The op rounds where the separate ones round, so nothing changes.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import arg, calls, val
from pagebinder.passes.quantised_outputs import (
    Quantisation,
    fuse_quantisations,
    insert_quantising,
    part_of,
    quantisation_of,
    take_result,
)
from pagebinder.report import PassResult

PATTERN = "rms_norm_fp8_quant"
ours = torch.ops.pagebinder
ADD_NORM = ours.add_rms_norm.default
NORMS = (ours.rms_norm.default, ADD_NORM)


def fuse_rms_norm_fp8_quant(gm: GraphModule) -> PassResult:
    """Rewrite every norm whose result is only quantised; the others are refused with what reads them."""
    return fuse_quantisations(gm, PATTERN, calls(gm.graph, *NORMS), _quantisation, _fuse)


def _quantisation(norm: Node) -> Quantisation | str:
    normed = norm if norm.target is not ADD_NORM else part_of(norm, 0)
    if normed is None:
        return "its result is not quantised"
    weight = _weight(norm)
    if weight is not None and val(weight).dtype not in (val(norm.args[0]).dtype, torch.float32):
        return "the weight has another dtype than the values, and is not float32"
    return quantisation_of(normed)


def _weight(norm: Node) -> Node | None:
    return arg(norm, 2 if norm.target is ADD_NORM else 1, "weight")


def _fuse(gm: GraphModule, norm: Node, quantisation: Quantisation) -> Node:
    adds = norm.target is ADD_NORM
    target = ours.add_rms_norm_fp8_quant.default if adds else ours.rms_norm_fp8_quant.default
    operands = (*norm.args[: 2 if adds else 1], _weight(norm))
    if quantisation.static_scale is not None:
        operands += (quantisation.static_scale,)
    fused = insert_quantising(gm, norm, target, operands, dict(norm.kwargs), quantisation)
    for index in (0, 1):
        take_result(gm, norm, fused, index, part_of(quantisation.node, index))
    if adds and (total := part_of(norm, 1)) is not None:
        take_result(gm, norm, fused, 2, total)
    return fused
