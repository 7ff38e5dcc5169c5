"""`pagebinder::fp8_linear`: the linear layer of activations and weights that both are e4m3 codes with scales.

    y [..., N] = (x codes * x scale) (weight codes * weight scale)^T + bias         summed in float32, rounded once

The weight is packed as in `linear/weight_formats.py`, in format "fp8", "fp8_tensor" or "fp8_block"; x and its scale
are what `quant.py` makes. Any granularity of the one goes with any of the other.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.fp8.quant import CODES, GROUP, dequantise
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.linear.weight_formats import PANEL, STEP
from pagebinder.custom_ops.linear.weight_numbers import dequantize

FORMATS = ("fp8", "fp8_tensor", "fp8_block")


def fp8_linear_reference(x, x_scale, qweight, scale, bias=None, *, format, dtype):
    """The layer in float32, rounded once to `dtype`.

    Args:
        x: codes [..., K] float8_e4m3fn. x_scale: [1], [..., 1] or [..., ceil(K / 128)] float32.
        qweight, scale: a weight [N, K] in `format`, packed. bias: [N] or None.
        format: one of FORMATS. dtype: of the result.
    Returns:
        [..., N] in `dtype`.
    Raises:
        ValueError: another format, or shapes and dtypes that do not fit.
    """
    _check(x, x_scale, qweight, format)
    bias = None if bias is None else bias.float()
    weight = dequantize(qweight, scale, format)
    return torch.nn.functional.linear(dequantise(x, x_scale), weight, bias).to(dtype)


def _check(x, x_scale, qweight, format):
    if format not in FORMATS:
        raise ValueError(f"fp8_linear takes weights in {', '.join(FORMATS)}, not {format!r}")
    inner = qweight.shape[1] * STEP
    if x.dtype != CODES or x.shape[-1] != inner:
        raise ValueError(f"x must be {CODES} [..., {inner}], not {x.dtype} {list(x.shape)}")
    rows, groups = tuple(x.shape[:-1]), -(-inner // GROUP)
    fits = tuple(x_scale.shape) in ((1,), (*rows, 1), (*rows, groups))
    if not fits or x_scale.dtype != torch.float32:
        raise ValueError(
            f"x_scale must be float32 [1], {[*rows, 1]} or {[*rows, groups]}, not {list(x_scale.shape)}"
        )


def _fp8_linear_fake(x, x_scale, qweight, scale, bias=None, *, format, dtype):
    return x.new_empty((*x.shape[:-1], qweight.shape[0] * PANEL), dtype=dtype)


FP8_LINEAR = define_op(
    "fp8_linear",
    "(Tensor x, Tensor x_scale, Tensor qweight, Tensor scale, Tensor? bias=None, *, str format, ScalarType dtype) "
    "-> Tensor",
    reference=fp8_linear_reference,
    fake=_fp8_linear_fake,
    capture="always",
)
