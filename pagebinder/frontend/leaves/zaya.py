"""Leaf: the two causal convolutions of ZAYA's attention, and the half of its values that comes one token late.

    the source                                              while capturing
    pad(qk, (K1 - 1) + (K2 - 1) in front)
    depthwise conv with K1 taps and a bias b                z = short_conv(qk), without b: zero before the sequence
    grouped conv with K2 taps                               for each tap, z of so many tokens ago (short_conv), + b
    v_proj_delayed(x[t - 1]), of a zero row at first        v_proj_delayed(short_conv(x))

What the depthwise convolution makes of padding is b, and the grouped one reads that before the sequence's start; so b
is added after the look back, where it stands in front of every token.
"""

from __future__ import annotations

from collections import Counter

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf


def project(self, hidden_states, cache, conv_mask=None):
    """Of ZayaCCAProjection: x [1, T, C] -> q [1, T, H, D], k and v [1, T, G, D]."""
    if hidden_states.shape[0] != 1 or cache is not None or conv_mask is not None:
        raise CaptureError("ZayaCCAProjection is traced for one sequence without a cache or a mask.")
    tokens, width = hidden_states.shape[:-1], self.head_dim
    q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
    mixed = _convolved(self, torch.cat([q, k], dim=-1)[0]).unsqueeze(0)
    repeated = k.view(*tokens, -1, 1, width).expand(*tokens, -1, self.num_key_value_groups, width)
    q_residual = (q.view(*tokens, -1, width) + repeated.reshape(*tokens, -1, width)) * 0.5
    k_residual = q_residual.view(*tokens, -1, self.num_key_value_groups, width).mean(dim=-2)
    num_queries = self.num_attention_heads * width
    query = mixed[..., :num_queries].view(*tokens, -1, width) + q_residual
    key = mixed[..., num_queries:].view(*tokens, -1, width) + k_residual
    before = _earlier(hidden_states[0], 1).unsqueeze(0)
    value = torch.cat([self.v_proj_current(hidden_states), self.v_proj_delayed(before)], dim=-1)
    return query, key, value.view(*tokens, -1, width)


def _convolved(self, x: torch.Tensor) -> torch.Tensor:
    """Both convolutions of [T, W]."""
    first, second = self.conv_qk_depthwise, self.conv_qk_grouped
    z = torch.ops.pagebinder.short_conv(x, first.weight[:, 0], None, activation=None)
    num_taps, groups = second.weight.shape[-1], second.groups
    weight_GOIK = second.weight.unflatten(0, (groups, -1))
    out = second.bias
    for tap in range(num_taps):
        past = _earlier(z, num_taps - 1 - tap) + first.bias
        of_groups = past.view(x.shape[0], groups, 1, -1) @ weight_GOIK[..., tap].transpose(1, 2)
        out = out + of_groups.reshape(x.shape[0], -1)
    return out


def _earlier(x: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[T, W] -> each row as it was so many tokens ago, zeros at first."""
    if not num_tokens:
        return x
    taps = torch.zeros(x.shape[1], num_tokens + 1, dtype=x.dtype, device=x.device)
    taps = torch.cat([torch.ones_like(taps[:, :1]), taps[:, 1:]], dim=1)
    return torch.ops.pagebinder.short_conv(x, taps, None, activation=None)


class ConvolutionsLeaf(Leaf):
    """One op for the depthwise convolution, one for each earlier tap of the grouped one, one for the values."""

    def expected(self, module: torch.nn.Module) -> Counter:
        return Counter({self.emits[0]: 2 + module.conv_qk_grouped.weight.shape[-1] - 1})


ZAYA = ConvolutionsLeaf(
    name="compressed convolutional attention",
    classes=("ZayaCCAProjection",),
    functions={"ZayaCCAProjection.forward": project},
    emits=(torch.ops.pagebinder.short_conv.default,),
    seen_on=("5.23", "5.24"),
)
