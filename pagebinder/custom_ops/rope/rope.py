"""Rotary position embedding (Su et al., 2021) applied to heads.

style "half": channel i is paired with channel i + D/2 (Llama, Qwen, Mistral, Gemma, Phi); tables of D columns:

    out = x * cos + cat(-x[D/2:], x[:D/2]) * sin

style "interleaved": channel 2i is paired with channel 2i + 1 (Llama 4, DeepSeek); tables of D/2 columns,
one per pair. It is the product of the complex numbers x[2i] + j x[2i+1] and cos[i] + j sin[i]:

    out[2i] = x[2i] * cos[i] - x[2i+1] * sin[i]        out[2i+1] = x[2i] * sin[i] + x[2i+1] * cos[i]
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op

STYLES = ("half", "interleaved")


def rope_reference(x, cos, sin, *, style):
    """Rotate heads in x's and cos's promoted dtype.

    Args:
        x: [..., D]. cos, sin: broadcast against x, with D ("half") or D/2 ("interleaved") columns.
    Raises:
        ValueError: unknown style.
    """
    if style == "half":
        half = x.shape[-1] // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + rotated * sin
    if style == "interleaved":
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    raise ValueError(f"unknown RoPE style {style!r}; one of {STYLES}")


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
