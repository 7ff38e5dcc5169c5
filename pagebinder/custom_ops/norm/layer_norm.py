"""LayerNorm and its fused form with the residual add (Ba, Kiros, Hinton, 2016), as torch computes it.

y = (x - mean) / sqrt(variance + eps) * weight + bias        in float32, rounded once
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pagebinder.custom_ops.library import define_op


def layer_norm_reference(x, weight=None, bias=None, *, eps):
    """LayerNorm over the last dimension: x [..., C], weight and bias [C] or None; returns x's dtype."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _layer_norm_fake(x, weight=None, bias=None, *, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def add_layer_norm_reference(x, residual, weight=None, bias=None, *, eps):
    """(layer_norm(x + residual), x + residual)."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps=eps), total


def _add_layer_norm_fake(x, residual, weight=None, bias=None, *, eps):
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(total), total


LAYER_NORM = define_op(
    "layer_norm",
    "(Tensor x, Tensor? weight=None, Tensor? bias=None, *, float eps) -> Tensor",
    reference=layer_norm_reference,
    fake=_layer_norm_fake,
    transparent=True,
)

ADD_LAYER_NORM = define_op(
    "add_layer_norm",
    "(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, *, float eps) -> (Tensor, Tensor)",
    reference=add_layer_norm_reference,
    fake=_add_layer_norm_fake,
    transparent=True,
)
