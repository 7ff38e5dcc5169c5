"""Leaf: MPNet's attention, whose relative bias counts rows and whose scores are made by hand.

    the source                                         while capturing
    position_bias [1, H, T, T] from arange(T)          bias by distance [H, N], columns j - p = -128 .. 128
    softmax(q k' / sqrt(D) + bias + mask) v            relative_attention(q, k, v, bias)

The bias comes from the source's own buckets and table; the last bucket begins at its `max_distance` of 128. That
there is no mask is `encoder_only.no_padding_mask`'s doing.
"""

from __future__ import annotations

import inspect

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf


def compute_position_bias(self, x, position_ids=None, num_buckets=32):
    """Of MPNetEncoder: the bias of each head by distance [H, N], for all rows alike."""
    if position_ids is not None:
        raise CaptureError(
            "MPNetEncoder is given position_ids for its relative bias, which is not known here."
        )
    reach = _reach(self)
    bucket = self.relative_position_bucket(
        torch.arange(-reach, reach + 1, device=x.device), num_buckets=num_buckets
    )
    return self.relative_attention_bias(bucket).transpose(0, 1)


def _reach(encoder) -> int:
    """The distance from which on all keys share a bucket."""
    return inspect.signature(encoder.relative_position_bucket).parameters["max_distance"].default


def attend(self, hidden_states, attention_mask=None, position_bias=None, output_attentions=False, **kwargs):
    """Of MPNetSelfAttention: [1, T, C] -> ([1, T, C],)."""
    if attention_mask is not None or position_bias is None or output_attentions:
        raise CaptureError(
            "MPNetSelfAttention is called with a mask or without its relative bias; not known here."
        )
    heads = (hidden_states.shape[1], -1, self.attention_head_size)
    q_THD, k_THD, v_THD = (project(hidden_states)[0].view(heads) for project in (self.q, self.k, self.v))
    out_THD = torch.ops.pagebinder.relative_attention(
        q_THD,
        k_THD,
        v_THD,
        position_bias,
        scale=self.attention_head_size**-0.5,
        num_behind=position_bias.shape[1] // 2,
        causal=False,
    )
    return (self.o(out_THD.flatten(1).unsqueeze(0)),)


MPNET = Leaf(
    name="mpnet",
    classes=("MPNetSelfAttention",),
    functions={
        "MPNetEncoder.compute_position_bias": compute_position_bias,
        "MPNetSelfAttention.forward": attend,
    },
    emits=(torch.ops.pagebinder.relative_attention.default,),
    seen_on=("5.23", "5.24"),
)
