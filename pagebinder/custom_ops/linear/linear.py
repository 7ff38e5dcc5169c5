"""The linear layer as an op of ours, so that a provider can serve it: y = x W^T + b.

It stands where the weight is a parameter (passes/place_linears.py). The reference is torch's own.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op


def linear_reference(x, weight, bias=None):
    """x [..., K], weight [N, K], bias [N] or None -> [..., N] in x's dtype."""
    return torch.nn.functional.linear(x, weight, bias)


def _linear_fake(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


LINEAR = define_op(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    reference=linear_reference,
    fake=_linear_fake,
)
