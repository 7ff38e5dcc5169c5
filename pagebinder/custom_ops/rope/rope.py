"""Rotary position embedding (Su et al., 2021) applied to heads.

style "half": channel i is paired with channel i + D/2 (Llama, Qwen, Mistral, Gemma, Phi):

    out = x * cos + cat(-x[D/2:], x[:D/2]) * sin
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op

STYLES = ("half",)


def rope_reference(x, cos, sin, *, style):
    """Rotate x [..., H, T, D] by cos and sin [..., 1, T, D] (broadcast against x) in x's and cos's promoted dtype."""
    if style != "half":
        raise ValueError(f"unknown RoPE style {style!r}; one of {STYLES}")
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def _rope_fake(x, cos, sin, *, style):
    dtype = torch.promote_types(x.dtype, cos.dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


ROPE = define_op(
    "rope",
    "(Tensor x, Tensor cos, Tensor sin, *, str style) -> Tensor",
    reference=rope_reference,
    fake=_rope_fake,
    transparent=True,
)
