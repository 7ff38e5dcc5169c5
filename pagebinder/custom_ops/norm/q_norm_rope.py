"""Weightless RMSNorm of every query head and RoPE of its trailing channels, in one op (DeepSeek-V4).

Legend: T tokens, H query heads, D head width, P pairs of channels that turn.

    head    | D - 2P channels: normed       | 2P channels: normed, then turned |
                                              pair i: channels 2i, 2i + 1; angle of column i

It is `rms_norm(tail="none")` followed by RoPE of style "interleaved" in float32: rounded to q's dtype after the norm
and again after the rotation.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.norm.rms_norm import rms_norm_reference
from pagebinder.custom_ops.rope.rope import rope_reference


def q_norm_rope_reference(q, cos, sin, *, eps):
    """Norm, then rotate.

    Args:
        q: [T, H, D] floating. cos, sin: [T, P] floating, 2P <= D.
    Returns:
        [T, H, D] in q's dtype.
    Raises:
        ValueError: shapes that do not fit.
    """
    check_trailing_rope(q, cos, sin, "q")
    return rotate_trailing(rms_norm_reference(q, eps=eps, tail="none"), cos, sin)


def rotate_trailing(x_THD, cos_TP, sin_TP):
    """RoPE of style "interleaved" on the trailing 2P channels, in float32; the others are left alone."""
    kept, turned = x_THD.split([x_THD.shape[-1] - 2 * cos_TP.shape[-1], 2 * cos_TP.shape[-1]], dim=-1)
    cos, sin = cos_TP.float().unsqueeze(1), sin_TP.float().unsqueeze(1)
    turned = rope_reference(turned.float(), cos, sin, style="interleaved")
    return torch.cat((kept, turned.to(x_THD.dtype)), dim=-1)


def check_trailing_rope(x, cos, sin, name):
    """Raises ValueError unless x is [T, H, D] and cos, sin are [T, P] with 2P <= D."""
    if x.dim() != 3:
        raise ValueError(f"{name} must be [T, H, D], not {tuple(x.shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != x.shape[0]:
        raise ValueError(
            f"cos and sin must be [{x.shape[0]}, P]: they are {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(
            f"{cos.shape[1]} pairs do not fit into the {x.shape[2]} channels of a head of {name}"
        )


def _q_norm_rope_fake(q, cos, sin, *, eps):
    return q.new_empty(q.shape)


Q_NORM_ROPE = define_op(
    "q_norm_rope",
    "(Tensor q, Tensor cos, Tensor sin, *, float eps) -> Tensor",
    reference=q_norm_rope_reference,
    fake=_q_norm_rope_fake,
    capture="always",
)
