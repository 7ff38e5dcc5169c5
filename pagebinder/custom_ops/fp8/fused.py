"""What makes activations, with their quantisation: one op that returns codes and scales, and no values.

    rms_norm_fp8_quant             rms_norm, then scaled_fp8_quant
    add_rms_norm_fp8_quant         x + residual, the same of the sum, and the sum
    gated_activation_fp8_quant     act(gate) * up, then scaled_fp8_quant

Every rounding of the separate ops is made: a reference has their bits.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.activation.gated_activation import gated_activation_reference
from pagebinder.custom_ops.fp8.quant import check_quant, empty_quantised, scaled_fp8_quant_reference
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.norm.rms_norm import add_rms_norm_reference, rms_norm_reference


def rms_norm_fp8_quant_reference(x, weight=None, scale=None, *, eps, tail, granularity):
    """x [..., C], weight [C] or None, scale [1] or None -> (codes [..., C], scale).

    See `rms_norm` and `scaled_fp8_quant`.

    Raises:
        ValueError: an unknown tail, or as `scaled_fp8_quant`.
    """
    return scaled_fp8_quant_reference(
        rms_norm_reference(x, weight, eps=eps, tail=tail), scale, granularity=granularity
    )


def add_rms_norm_fp8_quant_reference(x, residual, weight=None, scale=None, *, eps, tail, granularity):
    """x, residual [..., C] -> (codes [..., C], scale, x + residual); see `rms_norm_fp8_quant`."""
    normed, total = add_rms_norm_reference(x, residual, weight, eps=eps, tail=tail)
    return *scaled_fp8_quant_reference(normed, scale, granularity=granularity), total


def gated_activation_fp8_quant_reference(gate, up, scale=None, *, activation, granularity):
    """gate, up [..., C] of one dtype, scale [1] or None -> (codes [..., C], scale); see `gated_activation`.

    Raises:
        ValueError: an unknown activation, or as `scaled_fp8_quant`.
    """
    return scaled_fp8_quant_reference(
        gated_activation_reference(gate, up, activation=activation), scale, granularity=granularity
    )


def _rms_norm_fp8_quant_fake(x, weight=None, scale=None, *, eps, tail, granularity):
    check_quant(scale, granularity)
    return empty_quantised(x, granularity)


def _add_rms_norm_fp8_quant_fake(x, residual, weight=None, scale=None, *, eps, tail, granularity):
    check_quant(scale, granularity)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return *empty_quantised(x, granularity), total


def _gated_activation_fp8_quant_fake(gate, up, scale=None, *, activation, granularity):
    check_quant(scale, granularity)
    return empty_quantised(gate, granularity)


RMS_NORM_FP8_QUANT = define_op(
    "rms_norm_fp8_quant",
    "(Tensor x, Tensor? weight=None, Tensor? scale=None, *, float eps, str tail, str granularity) "
    "-> (Tensor, Tensor)",
    reference=rms_norm_fp8_quant_reference,
    fake=_rms_norm_fp8_quant_fake,
    capture="always",
)

ADD_RMS_NORM_FP8_QUANT = define_op(
    "add_rms_norm_fp8_quant",
    "(Tensor x, Tensor residual, Tensor? weight=None, Tensor? scale=None, *, float eps, str tail, str granularity) "
    "-> (Tensor, Tensor, Tensor)",
    reference=add_rms_norm_fp8_quant_reference,
    fake=_add_rms_norm_fp8_quant_fake,
    capture="always",
)

GATED_ACTIVATION_FP8_QUANT = define_op(
    "gated_activation_fp8_quant",
    "(Tensor gate, Tensor up, Tensor? scale=None, *, str activation, str granularity) -> (Tensor, Tensor)",
    reference=gated_activation_fp8_quant_reference,
    fake=_gated_activation_fp8_quant_fake,
    capture="always",
)
