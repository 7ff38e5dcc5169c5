"""`pagebinder_triton::paged_short_conv`: tokens are independent, so a program takes a tile of a request's.

    grid [T // BLOCK_T + R + 1, channel tiles]     as many tiles as requests of any lengths have; request R: padding

    inputs of token t     t - (K - 1) ... t        out of x, or out of the state where they lie before the step
    state after token t   t - (K - 2) ... t        all but the first: what a token has read is the checkpoint that it
                                                   writes, if one is due behind it

Only the first tile of a request reads a state, as a tile has K - 1 tokens at least. Where a step begins within a
block, its first checkpoint goes into that block. The first tile writes it, wherever that token is: no other tile may
write what this one reads.

Taps are added in the order of the reference, so that how tokens are cut into steps changes no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.recurrent.define import require
from pagebinder.custom_ops.recurrent.short_conv import check_paged_short_conv
from pagebinder.custom_ops.triton.attention_kernels import request_of_tile
from pagebinder.custom_ops.triton.recurrent_steps import (
    block_after,
    in_rows,
    span_of_request,
    step_operands,
)
from pagebinder.custom_ops.triton.values import SIZES, rounded

# Of a mixed batch; where every request may have one token alone, a tile has as few as it can.
TOKENS_OF_TILE = 32
VALUES_OF_TILE = 2048
MAX_CHANNELS_OF_TILE = 256


@triton.jit(do_not_specialize=SIZES)
def short_conv_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr, stride_r, num_tokens, num_requests,
    num_blocks, columns, block_size, stride_n, stride_c, stride_s, stride_x, C, K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """out [T, C] of x and the states [N, C, K - 1]; w [C, K]."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    request = request_of_tile(starts_ptr, tl.program_id(0), num_requests, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = (channel < C)[None, :]
    index = tl.program_id(0) - tl.load(starts_ptr + request) // BLOCK_T - request
    token = index * BLOCK_T + tl.arange(0, BLOCK_T)
    if request == num_requests:
        first = tl.load(starts_ptr + request).to(tl.int64)
        out_ptrs = out_ptr + (first + token)[:, None] * C + channel[None, :]
        zeros = tl.zeros((BLOCK_T, BLOCK_C), tl.float32).to(dtype)
        tl.store(out_ptrs, zeros, mask=(first + token < num_tokens)[:, None] & is_channel)
        return
    first, context, end = span_of_request(lens_ptr, starts_ptr, request)
    num_new = end - context
    if index * BLOCK_T >= num_new:
        return
    table_ptr += request.to(tl.int64) * stride_r
    after = context + token + 1  # tokens, with each of the tile's
    is_due = (token < num_new) & ((after % block_size == 0) | (after == end))
    # The first checkpoint, 0 where it has a block of its own.
    boundary = tl.minimum((context // block_size + 1) * block_size, end)
    into_start = tl.where(context % block_size != 0, boundary, 0)
    is_due &= (index == 0) | (after != into_start)
    to_block = block_after(table_ptr, tl.where(is_due, after, 0), block_size, columns, num_blocks)
    from_block = block_after(table_ptr, context, block_size, columns, num_blocks)
    x_ptr += first * stride_x + channel[None, :]
    cache_ptr += channel[None, :] * stride_c
    from_ptr = cache_ptr + from_block * stride_n
    to_ptrs = cache_ptr + to_block[:, None] * stride_n
    writes = (to_block > 0)[:, None] & is_channel
    y = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(K):
        row = (token + (tap - (K - 1))).to(tl.int64)[:, None]
        value = tl.load(x_ptr + row * stride_x, mask=(row >= 0) & (row < num_new) & is_channel, other=0.0)
        if index == 0:
            kept = (row < 0) & (from_block > 0) & is_channel
            before = tl.load(from_ptr + (row + (K - 1)) * stride_s, mask=kept, other=0.0)
            value = tl.where(row < 0, before, value)
            tl.debug_barrier()  # threads read what others write
        if tap > 0:
            tl.store(to_ptrs + (tap - 1) * stride_s, value, mask=writes)
        w = tl.load(w_ptr + channel * K + tap, mask=channel < C, other=0.0).to(tl.float32)
        y += value.to(tl.float32) * w[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = y / (1 + tl.exp(-y))
    out_ptrs = out_ptr + (first + token)[:, None] * C + channel[None, :]
    tl.store(out_ptrs, rounded(y, dtype), mask=(token < num_new)[:, None] & is_channel)
    if (index == 0) & (into_start - context > BLOCK_T):
        x_ptr += (into_start - context - (K - 1)).to(tl.int64) * stride_x
        for slot in tl.static_range(K - 1):
            last = tl.load(x_ptr + slot * stride_x, mask=is_channel, other=0.0)
            tl.store(from_ptr + slot * stride_s, last, mask=is_channel & (from_block > 0))


def paged_short_conv(
    x, weight, bias, cache, block_table, seq_lens, query_start_loc, *, block_size, activation
):
    """See `paged_short_conv_reference`."""
    check_paged_short_conv(x, weight, cache, activation)
    require(bias is None or bias.shape == x.shape[1:], "bias is [C]")
    metadata = (block_table, seq_lens, query_start_loc)
    step = step_operands(cache, *metadata, num_tokens=len(x), block_size=block_size)
    (num_tokens, channels), taps = x.shape, weight.shape[1]
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, bias, weight = in_rows(x), in_rows(bias), weight.contiguous()
    fewest = triton.next_power_of_2(taps - 1)
    block_t = fewest if num_tokens <= len(seq_lens) else max(fewest, TOKENS_OF_TILE)
    block_c = min(MAX_CHANNELS_OF_TILE, max(16, VALUES_OF_TILE // block_t), triton.next_power_of_2(channels))
    grid = (num_tokens // block_t + len(seq_lens) + 1, triton.cdiv(channels, block_c))
    short_conv_kernel[grid](
        x, weight, bias, out, cache, *step, *cache.stride(), x.stride(0), channels, K=taps, BLOCK_T=block_t,
        BLOCK_C=block_c, SILU=activation == "silu", num_warps=4 if block_t * block_c >= 1024 else 1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
