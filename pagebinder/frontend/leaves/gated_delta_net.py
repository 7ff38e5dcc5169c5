"""Leaves: the gated delta net of Qwen3-Next and its kin, and Kimi delta attention, whose decay is per channel.

Without them the capture sees a convolution along the tokens, and the chunked delta rule unrolled into some hundred
ops a layer that relate all tokens of a chunk: true, but nothing that can be paged.
"""

from __future__ import annotations

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.functions import (
    causal_conv1d_fn,
    chunk_kimi_delta_attention,
    torch_chunk_gated_delta_rule,
)

_EMITS = (torch.ops.pagebinder.short_conv.default, torch.ops.pagebinder.gated_delta_rule.default)

GATED_DELTA_NET = Leaf(
    name="gated delta net",
    classes=(
        "Qwen3NextGatedDeltaNet",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5MoeGatedDeltaNet",
        "Qwen4ExpTextGatedDeltaNet",
        "OlmoHybridGatedDeltaNet",
        "LaraMiniGatedDeltaNet",
    ),
    functions={
        "causal_conv1d_fn": causal_conv1d_fn,
        "torch_chunk_gated_delta_rule": torch_chunk_gated_delta_rule,
    },
    emits=_EMITS,
    seen_on=("5.17", "5.23", "5.24"),
)

KIMI_DELTA_ATTENTION = Leaf(
    name="kimi delta attention",
    classes=("KimiLinearDeltaAttention", "BailingHybridDeltaAttention", "Glm5NextTextLinearAttention"),
    functions={
        "causal_conv1d_fn": causal_conv1d_fn,
        "chunk_kimi_delta_attention": chunk_kimi_delta_attention,
    },
    emits=_EMITS,
    seen_on=("5.23", "5.24"),
)
