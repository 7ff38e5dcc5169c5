"""Leaf: the short convolution of LFM2, which is the whole token mixing of its layers of type "conv".

Without it the capture sees a convolution along the tokens, which cannot be paged.
"""

from __future__ import annotations

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.functions import causal_conv1d_fn

LFM2_SHORT_CONV = Leaf(
    name="lfm2 short convolution",
    classes=("Lfm2ShortConv",),
    functions={"causal_conv1d_fn": causal_conv1d_fn},
    emits=(torch.ops.pagebinder.short_conv.default,),
    seen_on=("5.17", "5.23"),
)
