"""`pagebinder_triton::paged_linear_recurrence` and `paged_wkv`: a program takes some channels, token by token.

    grid [R + 1, channel tiles]     channels are independent; a state has one row of them, or three

Operands of the next token are on their way while one is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.recurrent import wkv
from pagebinder.custom_ops.recurrent.define import RECURRENCES
from pagebinder.custom_ops.triton.recurrent_steps import (
    block_after,
    clear_rows,
    in_rows,
    load_part,
    span_of_request,
    step_operands,
)
from pagebinder.custom_ops.triton.values import SIZES, rounded

# By one warp: a step is a chain of additions, so many programs matter more than wide ones.
CHANNELS_OF_TILE = 128
NOTHING_SEEN = tl.constexpr(wkv.NOTHING_SEEN)


@triton.jit
def load_two(a_ptr, b_ptr, mask):
    """Channels of both operands of a token, in float32."""
    a = tl.load(a_ptr, mask=mask, other=0.0).to(tl.float32)
    return a, tl.load(b_ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def linear_recurrence_kernel(
    x_ptr, decay_ptr, out_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr, stride_r, num_tokens, num_requests,
    num_blocks, columns, block_size, stride_n, stride_w, stride_x, stride_decay, W, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, W] of x and decay [T, W]; states [N, W]."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < W
    out_ptr += channel
    if request == num_requests:
        clear_rows(out_ptr, is_channel, W, tl.load(starts_ptr + request), num_tokens)
        return
    first, context, end = span_of_request(lens_ptr, starts_ptr, request)
    if context >= end:
        return
    table_ptr += request.to(tl.int64) * stride_r
    state_ptr = cache_ptr + channel * stride_w
    block = block_after(table_ptr, context, block_size, columns, num_blocks)
    state = load_part(state_ptr + block * stride_n, is_channel & (block > 0))
    x_ptr += first * stride_x + channel
    decay_ptr += first * stride_decay + channel
    out_ptr += first * W
    x, decay = load_two(x_ptr, decay_ptr, is_channel)
    p = context
    while p < end:
        stop = tl.minimum((p // block_size + 1) * block_size, end)
        for t in tl.range(p, stop):
            x_ptr += stride_x
            decay_ptr += stride_decay
            next_x, next_decay = load_two(x_ptr, decay_ptr, is_channel & (t + 1 < end))
            state = decay * state + x
            tl.store(out_ptr, rounded(state, out_ptr.dtype.element_ty), mask=is_channel)
            out_ptr += W
            x, decay = next_x, next_decay
        block = block_after(table_ptr, stop, block_size, columns, num_blocks)
        tl.store(state_ptr + block * stride_n, state, mask=is_channel & (block > 0))
        p = stop


@triton.jit(do_not_specialize=SIZES)
def wkv_kernel(
    k_ptr, v_ptr, decay_ptr, bonus_ptr, out_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr, stride_r, num_tokens,
    num_requests, num_blocks, columns, block_size, stride_n, stride_row, stride_w, stride_k, stride_v, W,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, W] of k and v [T, W]; states [N, 3, W]: both sums, and the largest exponent, which scales them."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < W
    out_ptr += channel
    if request == num_requests:
        clear_rows(out_ptr, is_channel, W, tl.load(starts_ptr + request), num_tokens)
        return
    first, context, end = span_of_request(lens_ptr, starts_ptr, request)
    if context >= end:
        return
    table_ptr += request.to(tl.int64) * stride_r
    state_ptr = cache_ptr + channel * stride_w
    block = block_after(table_ptr, context, block_size, columns, num_blocks)
    mask = is_channel & (block > 0)
    num = load_part(state_ptr + block * stride_n, mask)
    den = load_part(state_ptr + block * stride_n + stride_row, mask)
    most = load_part(state_ptr + block * stride_n + 2 * stride_row, mask)
    most = tl.where(den == 0, NOTHING_SEEN, most)
    rate = tl.load(decay_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    bonus = tl.load(bonus_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    k_ptr += first * stride_k + channel
    v_ptr += first * stride_v + channel
    out_ptr += first * W
    k, v = load_two(k_ptr, v_ptr, is_channel)
    p = context
    while p < end:
        stop = tl.minimum((p // block_size + 1) * block_size, end)
        for t in tl.range(p, stop):
            k_ptr += stride_k
            v_ptr += stride_v
            next_k, next_v = load_two(k_ptr, v_ptr, is_channel & (t + 1 < end))
            higher = tl.maximum(most, k + bonus)
            seen, new = tl.exp(most - higher), tl.exp(k + bonus - higher)
            y = (seen * num + new * v) / (seen * den + new)
            tl.store(out_ptr, rounded(y, out_ptr.dtype.element_ty), mask=is_channel)
            out_ptr += W
            higher = tl.maximum(most + rate, k)
            seen, new = tl.exp(most + rate - higher), tl.exp(k - higher)
            num, den, most = seen * num + new * v, seen * den + new, higher
            k, v = next_k, next_v
        block = block_after(table_ptr, stop, block_size, columns, num_blocks)
        to_ptr, mask = state_ptr + block * stride_n, is_channel & (block > 0)
        tl.store(to_ptr, num, mask=mask)
        tl.store(to_ptr + stride_row, den, mask=mask)
        tl.store(to_ptr + 2 * stride_row, most, mask=mask)
        p = stop


def paged_linear_recurrence(x, decay, cache, block_table, seq_lens, query_start_loc, *, block_size):
    """See `diagonal.linear_scan` and `Recurrence.run_paged`."""
    return _launch(linear_recurrence_kernel, "linear_recurrence", (x, decay), (), cache, block_table, seq_lens,
                   query_start_loc, block_size)  # fmt: skip


def paged_wkv(k, v, decay, first, cache, block_table, seq_lens, query_start_loc, *, block_size):
    """See `wkv.wkv_scan` and `Recurrence.run_paged`."""
    return _launch(wkv_kernel, "wkv", (k, v), (decay, first), cache, block_table, seq_lens, query_start_loc,
                   block_size)  # fmt: skip


def _launch(kernel, name, tokens, weights, cache, block_table, seq_lens, query_start_loc, block_size):
    """`tokens` [T, W] and `weights` [W] of a recurrence -> [T, W] in the first one's dtype."""
    RECURRENCES[getattr(torch.ops.pagebinder, name).default].check_paged((*tokens, *weights), cache)
    metadata = (block_table, seq_lens, query_start_loc)
    step = step_operands(cache, *metadata, num_tokens=len(tokens[0]), block_size=block_size)
    out = torch.empty(tokens[0].shape, dtype=tokens[0].dtype, device=tokens[0].device)
    if out.numel() == 0:
        return out
    a, b = (in_rows(x) for x in tokens)
    channels = out.shape[1]
    block = min(CHANNELS_OF_TILE, triton.next_power_of_2(channels))
    kernel[len(seq_lens) + 1, triton.cdiv(channels, block)](
        a, b, *(in_rows(w) for w in weights), out, cache, *step, *cache.stride(), a.stride(0), b.stride(0), channels,
        BLOCK=block, num_warps=1,
    )  # fmt: skip
    return out
