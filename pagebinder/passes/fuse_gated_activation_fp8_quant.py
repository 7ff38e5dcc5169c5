"""The middle of a SwiGLU or GeGLU MLP and the FP8 quantisation of its result in one op.

Matches:
    y = gated_activation(gate, up, activation)                y read by nothing else
    codes, s = scaled_fp8_quant(y, static, granularity)
Replaces with:
    codes, s = gated_activation_fp8_quant(gate, up, static, activation, granularity)

The gated value is never stored. The op rounds where the separate ones round, so nothing changes.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import calls, val
from pagebinder.passes.quantised_outputs import (
    Quantisation,
    fuse_quantisations,
    insert_quantising,
    part_of,
    quantisation_of,
    take_result,
)
from pagebinder.report import PassResult

PATTERN = "gated_activation_fp8_quant"
ours = torch.ops.pagebinder


def fuse_gated_activation_fp8_quant(gm: GraphModule) -> PassResult:
    """Rewrite every gated activation whose result is only quantised; the others are refused with what reads them."""
    gated = calls(gm.graph, ours.gated_activation.default)
    return fuse_quantisations(gm, PATTERN, gated, _quantisation, _fuse)


def _quantisation(node: Node) -> Quantisation | str:
    gate, up = (val(operand) for operand in node.args[:2])
    if gate.dtype != up.dtype or gate.shape != up.shape:
        return "gate and up differ in shape or dtype"
    return quantisation_of(node)


def _fuse(gm: GraphModule, node: Node, quantisation: Quantisation) -> Node:
    operands = node.args[:2]
    if quantisation.static_scale is not None:
        operands += (quantisation.static_scale,)
    target = ours.gated_activation_fp8_quant.default
    fused = insert_quantising(gm, node, target, operands, dict(node.kwargs), quantisation)
    for index in (0, 1):
        take_result(gm, node, fused, index, part_of(quantisation.node, index))
    return fused
