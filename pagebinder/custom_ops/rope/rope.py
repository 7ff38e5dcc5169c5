"""Rotary position embedding (Su et al., 2021) applied to heads.

Channels turn in pairs by one angle each. Models differ in which channels form a pair, and in whether the tables have
a column for every channel (D, each angle twice) or for every pair (D/2):

    style            pair i           columns    used by
    "half"           i, i + D/2       D          Llama, Qwen, Mistral, Gemma, Phi
    "chunked"        i, i + D/2       D/2        GPT-OSS
    "every_two"      2i, 2i + 1       D          GPT-J, Cohere, GLM
    "interleaved"    2i, 2i + 1       D/2        Llama 4, DeepSeek-V2 (product of complex numbers)
    "deinterleaved"  2i, 2i + 1       D/2        DeepSeek-V3, which writes the pair to i and i + D/2

    first = first * cos - second * sin        second = second * cos + first * sin
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op

STYLES = ("half", "chunked", "every_two", "interleaved", "deinterleaved")


def rope_reference(x, cos, sin, *, style):
    """Rotate heads in x's and cos's promoted dtype.

    Args:
        x: [..., D]. cos, sin: broadcast against x, with D or D/2 columns, as the style says.
    Raises:
        ValueError: unknown style.
    """
    if style == "half":
        half = x.shape[-1] // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + rotated * sin
    if style == "chunked":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    if style == "deinterleaved":
        first, second = x[..., ::2], x[..., 1::2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    if style == "every_two":
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
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
