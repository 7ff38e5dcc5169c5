"""Leaves: the recurrent block of RecurrentGemma, a causal convolution and the real-gated linear recurrent unit."""

from __future__ import annotations

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.children import ChildLeaf, causal_convolution
from pagebinder.frontend.leaves.functions import require_no_state, require_plain


def _rnn_scan(
    self, hidden_states, recurrent_gate, reset, recurrent_states=None, acc_dtype=torch.float32
) -> tuple[torch.Tensor, None]:
    """x and gate [1, T, W], reset [1, T, 1] (true at position 0: nothing before it counts) -> ([1, T, W], None)."""
    require_plain("RecurrentGemmaRglru._rnn_scan", hidden_states, {})
    require_no_state("RecurrentGemmaRglru._rnn_scan", recurrent_states, False)
    if acc_dtype != torch.float32:
        raise CaptureError(f"RecurrentGemmaRglru accumulates in {acc_dtype}; only float32 is known here.")
    out = torch.ops.pagebinder.linear_recurrence(hidden_states[0], (recurrent_gate * ~reset)[0])
    return out.unsqueeze(0), None


RG_LRU = Leaf(
    name="real-gated linear recurrent unit",
    classes=("RecurrentGemmaRglru",),
    functions={"RecurrentGemmaRglru._rnn_scan": _rnn_scan},
    emits=(torch.ops.pagebinder.linear_recurrence.default,),
    seen_on=("5.23", "5.24"),
)

RECURRENT_GEMMA_CONVOLUTION = ChildLeaf(
    name="recurrent gemma convolution",
    classes=("RecurrentGemmaRecurrentBlock",),
    functions={},
    emits=(torch.ops.pagebinder.short_conv.default,),
    seen_on=("5.23", "5.24"),
    child="conv_1d",
    forward=causal_convolution,
)
