"""Leaf: short convolutions that are modules of their own.

The whole token mixing of LFM2's layers of type "conv"; in Inkling they stand beside attention, over keys, values and
what a layer adds. Without the leaf the capture sees a convolution along the tokens, which cannot be paged.
"""

from __future__ import annotations

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.functions import causal_conv1d_fn

SHORT_CONVOLUTION = Leaf(
    name="short convolution",
    classes=(
        "Lfm2ShortConv",
        "Lfm2MoeShortConv",
        "Lfm3ShortConv",
        "InklingShortConvolution",
        "Inkling2ShortConvolution",
        "Inkling2LoopShortConvolution",
    ),
    functions={"causal_conv1d_fn": causal_conv1d_fn},
    emits=(torch.ops.pagebinder.short_conv.default,),
    seen_on=("5.17", "5.23", "5.24"),
)
