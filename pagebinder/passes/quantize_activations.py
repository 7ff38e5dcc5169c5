"""Activations of linear layers in fp8 (`CompileConfig.activation_quantization`). It changes numbers, so it is opt-in.

Matches:
    quantized_linear(x, codes, scale, b, format="fp8" | "fp8_tensor" | "fp8_block")
Replaces with:
    x_codes, x_scale = scaled_fp8_quant(x, static_scale, granularity=)
    fp8_linear(x_codes, x_scale, codes, scale, b, format=, dtype=)

Layers that read the same x share its codes. With static scales they share the largest of theirs, as merged layers
do. The LM head keeps its activations: it alone would cost as much as several other layers (docs/measurements.md).
fuse_rms_norm_fp8_quant.py, fuse_gated_activation_fp8_quant.py and fuse_attention_fp8_quant.py then merge the
quantisation with what makes x.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.fp8.linear import FORMATS
from pagebinder.custom_ops.fp8.quant import E4M3_MAX, dequantise
from pagebinder.errors import ConfigError
from pagebinder.graph_tools import (
    attribute,
    calls,
    describe,
    finish,
    insert_call,
    insert_constant,
    module_path,
    source_line,
    val,
)
from pagebinder.passes.quantize_weights import lm_head
from pagebinder.passes.rounding_check import RoundingCheck
from pagebinder.report import Certificate, Match, PassResult, Refusal

PATTERN = "fp8_linear"
SCALE_SUFFIX = ".input_scale"  # of a layer's module path: its static scale in a file
ours = torch.ops.pagebinder
QUANTIZED = ours.quantized_linear.default
NUM_ROWS = 64
MAGNITUDES = (1.0, 1e-3)
# Largest rounding error: relative to the value, and in scales, where values are subnormal.
RELATIVE_ERROR, ERROR_IN_SCALES = 2.0**-4, 2.0**-10


def quantize_activations(
    gm: GraphModule, *, granularity: str, scales: Mapping[str, torch.Tensor] | None = None
) -> PassResult:
    """Quantise what every linear layer with weights in fp8 reads, but for the LM head.

    Args:
        granularity: of the scales, see `custom_ops/fp8/quant.py`.
        scales: "<module path>.input_scale" -> one float32 value, for granularity "tensor"; None: dynamic scales.
    Raises:
        ConfigError: `scales` lack a layer, or a scale is not one positive number.
    """
    result = PassResult(
        name="quantize_activations",
        changes_numbers=True,
        rounds_values=True,
        rounds_activations=True,
        mixes_tokens=granularity == "tensor" and scales is None,
    )
    head = lm_head(gm.graph, QUANTIZED)
    readers: dict[Node, list[Node]] = {}
    for node in calls(gm.graph, QUANTIZED):
        reason = _reason_against(node, head)
        if reason:
            where = {"source_line": source_line(node), **describe(node)}
            result.refusals.append(Refusal(pattern=PATTERN, reason=reason, **where))
        else:
            readers.setdefault(node.args[0], []).append(node)
    for index, (x, layers) in enumerate(readers.items()):
        fixed = () if scales is None else (_static_scale(gm, layers, scales, index),)
        options = {"granularity": granularity}
        pair = insert_call(gm.graph, layers[0], ours.scaled_fp8_quant.default, (x, *fixed), options)
        parts = tuple(insert_call(gm.graph, layers[0], operator.getitem, (pair, i)) for i in (0, 1))
        for node in layers:
            fused = _fp8_form(gm, node, parts)
            result.matches.append(Match(pattern=PATTERN, detail=granularity, **describe(fused)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _reason_against(node: Node, head: Node | None) -> str | None:
    if node is head:
        return "it is the LM head, which keeps its activations"
    if node.kwargs["format"] not in FORMATS:
        return f"its weight is in {node.kwargs['format']}, not in fp8"
    return None


def _fp8_form(gm: GraphModule, node: Node, quantised: tuple[Node, Node]) -> Node:
    operands = (*quantised, *node.args[1:])
    options = {"format": node.kwargs["format"], "dtype": val(node).dtype}
    fused = insert_call(gm.graph, node, ours.fp8_linear.default, operands, options, value=val(node))
    node.replace_all_uses_with(fused)
    gm.graph.erase_node(node)
    return fused


def _static_scale(
    gm: GraphModule, layers: list[Node], scales: Mapping[str, torch.Tensor], index: int
) -> Node:
    """The get_attr node of the scale of what `layers` read, ahead of them: the largest of theirs."""
    found = []
    for layer in map(module_path, layers):
        name = layer + SCALE_SUFFIX
        if name not in scales:
            raise ConfigError(f"activation_scales lack {name!r}.")
        scale = scales[name].float()
        if scale.numel() != 1 or not (scale.isfinite() & (scale > 0)).all():
            raise ConfigError(f"activation_scales: {name!r} must be one positive number.")
        found.append(scale.reshape(1))
    name, largest = f"activation_scale_{index}", torch.cat(found).amax(0, keepdim=True)
    largest = largest.to(next(iter(gm.parameters()), largest).device)
    return insert_constant(gm, layers[0], name, largest)


def certify_activations(before: GraphModule, after: GraphModule, result: PassResult) -> list[Certificate]:
    """One certificate: random rows of every layer's width come back within what e4m3 and their scales promise.

    `max_rel_error` is the largest error of all rows of a layer, relative to them (root mean square).

    Raises:
        VerificationError: a value is further off than that.
    """
    check = RoundingCheck(result)
    generator = torch.Generator().manual_seed(0)
    for node in calls(after.graph, ours.scaled_fp8_quant.default):
        fixed = attribute(after, node.args[1].target).cpu() if len(node.args) > 1 else None
        for magnitude in MAGNITUDES:
            shape = NUM_ROWS, int(val(node.args[0]).shape[-1])
            x = torch.randn(shape, generator=generator, device="cpu") * magnitude
            back = dequantise(*ours.scaled_fp8_quant(x, fixed, **node.kwargs))
            check.add(node, node.kwargs["granularity"], x, back, _error_bound(x, fixed))
    return check.certificates()


def _error_bound(x: torch.Tensor, fixed: torch.Tensor | None) -> torch.Tensor:
    """How far values of x may come back from where they were; no scale that is made of them exceeds amax / 448."""
    scale = x.abs().max() / E4M3_MAX if fixed is None else fixed
    saturated = (x.abs() - E4M3_MAX * scale).clamp(min=0)
    return saturated + torch.maximum(RELATIVE_ERROR * x.abs(), ERROR_IN_SCALES * scale) * (1 + 1e-5)
