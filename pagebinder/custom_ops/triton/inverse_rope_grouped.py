"""`pagebinder_triton::inverse_rope_grouped_linear`: heads turned back, and through e4m3, in one pass; then products.

    turn_back_kernel    grid [tokens, channel tiles]    x [T, H, D] -> rows [T, H * D], 128 channels to a scale

The grouped product is a batched one of the library, over rows that are a tenth of the weights for a few tokens. Pairs
that begin at odd channels have no kernel: they are turned by the reference's steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.linear.inverse_rope_grouped import QUANT_CHANNELS, check_operands
from pagebinder.custom_ops.linear.inverse_rope_grouped import through_e4m3 as through_e4m3_reference
from pagebinder.custom_ops.norm.q_norm_rope import rotate_trailing
from pagebinder.custom_ops.triton.gpu import has_fp8
from pagebinder.custom_ops.triton.latent_rows import through_e4m3
from pagebinder.custom_ops.triton.norm_rope import turned_trailing
from pagebinder.custom_ops.triton.rms_norm import warps_of
from pagebinder.custom_ops.triton.values import rounded, through

TILE_CHANNELS = 2048


@triton.jit
def turn_back_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, stride_t, stride_h, stride_cos, stride_sin, WIDTH: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, QUANT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """QUANT: channels of a scale, 0 without fp8. D and the first pair's channel are even."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = channel < WIDTH
    x_ptr += token * stride_t
    x = tl.load(x_ptr + (channel // D).to(tl.int64) * stride_h + channel % D, mask=mask, other=0).to(
        tl.float32
    )
    if PAIRS > 0:
        first = tl.program_id(1) * BLOCK + 2 * tl.arange(0, BLOCK // 2)[None, :]
        pair = (first % D - (D - 2 * PAIRS)) // 2
        is_pair = (first < WIDTH) & (first % D >= D - 2 * PAIRS)
        cos = tl.load(cos_ptr + token * stride_cos + pair, mask=is_pair, other=0).to(tl.float32)
        sin = tl.load(sin_ptr + token * stride_sin + pair, mask=is_pair, other=0).to(tl.float32)
        x = through(turned_trailing(x, cos, -sin, is_pair), dtype)
    if QUANT > 0:
        x = tl.reshape(through_e4m3(tl.reshape(x, (1, BLOCK // QUANT, QUANT)), NATIVE), (1, BLOCK))
    tl.store(out_ptr + token * WIDTH + channel, rounded(x, dtype), mask=mask)


def inverse_rope_grouped_linear(x, cos, sin, weight, *, groups, fp8=False):
    """See `inverse_rope_grouped_linear_reference`."""
    check_operands(x, cos, sin, weight, groups, fp8)
    num_tokens = len(x)
    rows = _turned_back(x, cos, sin, fp8).view(num_tokens, groups, weight.shape[1])
    of_groups = weight.unflatten(0, (groups, len(weight) // groups)).transpose(1, 2)
    return torch.bmm(rows.transpose(0, 1), of_groups).transpose(0, 1).reshape(num_tokens, len(weight))


def _turned_back(x, cos, sin, fp8: bool) -> torch.Tensor:
    """[T, H * D] in x's dtype."""
    num_tokens, num_heads, head_dim = x.shape
    pairs, width = cos.shape[1], num_heads * head_dim
    if pairs and head_dim % 2:
        rows = rotate_trailing(x, cos, -sin).flatten(1)
        return through_e4m3_reference(rows) if fp8 else rows
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    block = min(TILE_CHANNELS, max(QUANT_CHANNELS, triton.next_power_of_2(width)))
    turn_back_kernel[num_tokens, triton.cdiv(width, block)](
        x, cos, sin, out, *x.stride()[:2], cos.stride(0), sin.stride(0), WIDTH=width, D=head_dim, PAIRS=pairs,
        BLOCK=block, QUANT=QUANT_CHANNELS if fp8 else 0, NATIVE=has_fp8(x.device), num_warps=warps_of(block),
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
