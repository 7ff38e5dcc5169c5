"""Leaf: the gated delta net of Qwen3-Next.

Without it the capture sees a convolution along the tokens, and the chunked delta rule unrolled into some hundred
ops a layer that relate all tokens of a chunk: true, but nothing that can be paged.
"""

from __future__ import annotations

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.functions import causal_conv1d_fn, torch_chunk_gated_delta_rule

GATED_DELTA_NET = Leaf(
    name="gated delta net",
    classes=("Qwen3NextGatedDeltaNet",),
    functions={
        "causal_conv1d_fn": causal_conv1d_fn,
        "torch_chunk_gated_delta_rule": torch_chunk_gated_delta_rule,
    },
    emits=(torch.ops.pagebinder.short_conv.default, torch.ops.pagebinder.gated_delta_rule.default),
    seen_on=("5.17", "5.23"),
)
