"""RMSNorm and its fused form with the residual add (Zhang and Sennrich, 2019).

Models agree on the head (square, mean, rsqrt in float32) and differ in the tail, which is a rounding contract:

    tail            value
    "cast_scale"    cast(x * r) * w           Llama, Qwen, Mistral, DeepSeek to V3.2
    "scale_cast"    cast(x * r * w)           GPT-OSS, DeepSeek-V4; w in float32
    "offset"        cast(x * r * (1 + w))     Gemma, Qwen3-Next
    "none"          cast(x * r)               weightless
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op

TAILS = ("cast_scale", "scale_cast", "offset", "none")


def rms_norm_reference(x, weight=None, *, eps, tail):
    """RMSNorm over the last dimension: x [..., C], weight [C] or None (tail "none"); returns x's dtype.

    With tail "cast_scale" the product has the promoted dtype of x and weight, as in the source models.
    """
    x_f32 = x.float()
    normed = x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + eps)
    if tail == "cast_scale":
        return weight * normed.to(x.dtype)
    if tail == "scale_cast":
        return (weight.float() * normed).to(x.dtype)
    if tail == "offset":
        return (normed * (1.0 + weight.float())).to(x.dtype)
    if tail == "none":
        return normed.to(x.dtype)
    raise ValueError(f"unknown RMSNorm tail {tail!r}; one of {TAILS}")


def _rms_norm_fake(x, weight=None, *, eps, tail):
    dtype = torch.promote_types(x.dtype, weight.dtype) if tail == "cast_scale" else x.dtype
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def add_rms_norm_reference(x, residual, weight=None, *, eps, tail):
    """(rms_norm(x + residual), x + residual): the pair that a pre-norm decoder layer needs."""
    total = x + residual
    return rms_norm_reference(total, weight, eps=eps, tail=tail), total


def _add_rms_norm_fake(x, residual, weight=None, *, eps, tail):
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return _rms_norm_fake(total, weight, eps=eps, tail=tail), total


RMS_NORM = define_op(
    "rms_norm",
    "(Tensor x, Tensor? weight=None, *, float eps, str tail) -> Tensor",
    reference=rms_norm_reference,
    fake=_rms_norm_fake,
    transparent=True,
)

ADD_RMS_NORM = define_op(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor? weight=None, *, float eps, str tail) -> (Tensor, Tensor)",
    reference=add_rms_norm_reference,
    fake=_add_rms_norm_fake,
    transparent=True,
)
