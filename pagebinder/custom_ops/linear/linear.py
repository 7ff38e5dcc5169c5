"""The linear layer as an op of ours, so that a provider can serve it: y = x W^T + b.

It stands where the weight is a parameter (passes/place_linears.py). The reference is torch's own. A weight may be
packed for the kernels (packed_weights.py), here and in the ops of several layers.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.linear.packed_weights import plain, plain_shape


def linear_reference(x, weight, bias=None):
    """x [..., K], weight [N, K] or packed, bias [N] or None -> [..., N] in x's dtype."""
    return torch.nn.functional.linear(x, plain(weight), bias)


def _linear_fake(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], plain_shape(weight)[0]))


LINEAR = define_op(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    reference=linear_reference,
    fake=_linear_fake,
    capture="always",
    fast_by={"cuda": "cuBLAS"},
)
