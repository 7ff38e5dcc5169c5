"""The linear layer with a weight of 8 or 4 bits, and the weight alone: y = x W^T + b, W = codes times scales.

Only weights are quantised: activations keep their dtype, and sums are float32. The formats are those of
`weight_formats`. passes/quantize_weights.py puts `dequantize_weight` in front of linear layers, and
passes/fuse_quantized_linear.py makes one op of both.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.linear.weight_formats import PANEL, STEP, dequantize
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
