"""Linear layers with weights of 8, 6 or 4 bits, and the weight alone: y = x W^T + b, W = codes times scales.

    quantized_linear        one layer
    quantized_linears       layers that read the same x, in one call: q, k and v
    quantized_gated_linear  the first half of a gated MLP: act(x Wg^T + bg) * (x Wu^T + bu)

Only weights are quantised: activations keep their dtype, and sums are float32. The formats are those of
`weight_formats`. passes/quantize_weights.py puts `dequantize_weight` in front of linear layers, and
passes/fuse_quantized_linear.py makes one op of both.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.activation.gated_activation import gated_activation_reference
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.linear.weight_formats import PANEL, STEP
from pagebinder.custom_ops.linear.weight_numbers import dequantize
from pagebinder.custom_ops.linear.weight_stacks import dequantize_stack


def dequantize_weight_reference(qweight, scale, *, format, dtype):
    """(packed codes, scale) -> the weight [N, K], or the stack of experts [E, N, K], rounded to `dtype`."""
    return dequantize_stack(qweight, scale, format, dtype)


def _dequantize_weight_fake(qweight, scale, *, format, dtype):
    panels, steps = qweight.shape[-4:-2]
    return qweight.new_empty((*qweight.shape[:-4], panels * PANEL, steps * STEP), dtype=dtype)


def quantized_linear_reference(x, qweight, scale, bias=None, *, format):
    """x [..., K], (qweight, scale) a weight [N, K] in `format`, bias [N] or None -> [..., N] in x's dtype.

    Computed in float32 and rounded once.
    """
    weight = dequantize(qweight, scale, format)
    bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight, bias).to(x.dtype)


def _quantized_linear_fake(x, qweight, scale, bias=None, *, format):
    return x.new_empty((*x.shape[:-1], qweight.shape[0] * PANEL))


def quantized_linears_reference(x, qweights, scales, biases, *, format):
    """Every layer by itself.

    Args:
        x: [..., K]. qweights, scales: of weights [N_i, K] in `format`. biases: of [N_i], one for each, or empty.
    Returns:
        A list of [..., N_i], one for each weight, in x's dtype.
    Raises:
        ValueError: a weight without its scale, or some weights have a bias and others not.
    """
    layers = zip(qweights, scales, _bias_of_each(qweights, scales, biases))
    return [quantized_linear_reference(x, *layer, format=format) for layer in layers]


def _bias_of_each(qweights, scales, biases):
    if not qweights or len(scales) != len(qweights) or len(biases) not in (0, len(qweights)):
        raise ValueError(
            f"quantized_linears needs a scale for each of its {len(qweights)} weights, and a bias for each or none"
        )
    return biases or [None] * len(qweights)


def _quantized_linears_fake(x, qweights, scales, biases, *, format):
    _bias_of_each(qweights, scales, biases)
    return [_quantized_linear_fake(x, *layer, format=format) for layer in zip(qweights, scales)]


def quantized_gated_linear_reference(
    x, gate, gate_scale, up, up_scale, gate_bias=None, up_bias=None, *, format, activation
):
    """Two quantised linear layers, then the gate; all three round to x's dtype.

    Args:
        x: [..., K]. (gate, gate_scale), (up, up_scale): weights [N, K] in `format`. gate_bias, up_bias: [N] or None.
    Returns:
        [..., N] in x's dtype.
    Raises:
        ValueError: weights of different shapes, or an unknown activation.
    """
    _check_gate(gate, up)
    return gated_activation_reference(
        quantized_linear_reference(x, gate, gate_scale, gate_bias, format=format),
        quantized_linear_reference(x, up, up_scale, up_bias, format=format),
        activation=activation,
    )


def _check_gate(gate, up):
    if gate.shape != up.shape:
        raise ValueError(
            f"codes of gate are {tuple(gate.shape)} and of up {tuple(up.shape)}: they must be alike"
        )


def _quantized_gated_linear_fake(
    x, gate, gate_scale, up, up_scale, gate_bias=None, up_bias=None, *, format, activation
):
    _check_gate(gate, up)
    return _quantized_linear_fake(x, gate, gate_scale, format=format)


DEQUANTIZE_WEIGHT = define_op(
    "dequantize_weight",
    "(Tensor qweight, Tensor scale, *, str format, ScalarType dtype) -> Tensor",
    reference=dequantize_weight_reference,
    fake=_dequantize_weight_fake,
    capture="always",
)

QUANTIZED_LINEAR = define_op(
    "quantized_linear",
    "(Tensor x, Tensor qweight, Tensor scale, Tensor? bias=None, *, str format) -> Tensor",
    reference=quantized_linear_reference,
    fake=_quantized_linear_fake,
    capture="always",
)

QUANTIZED_LINEARS = define_op(
    "quantized_linears",
    "(Tensor x, Tensor[] qweights, Tensor[] scales, Tensor[] biases, *, str format) -> Tensor[]",
    reference=quantized_linears_reference,
    fake=_quantized_linears_fake,
    capture="always",
)

QUANTIZED_GATED_LINEAR = define_op(
    "quantized_gated_linear",
    "(Tensor x, Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, Tensor? gate_bias=None, "
    "Tensor? up_bias=None, *, str format, str activation) -> Tensor",
    reference=quantized_gated_linear_reference,
    fake=_quantized_gated_linear_fake,
    capture="always",
)
