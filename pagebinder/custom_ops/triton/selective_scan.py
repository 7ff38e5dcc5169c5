"""`pagebinder_triton::paged_selective_scan`: a program takes some channels and all of their states, token by token.

    grid [R + 1, channel tiles]     channels are independent; all of them read one B and one C

Operands of the next token are on their way while one is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.recurrent.define import RECURRENCES
from pagebinder.custom_ops.triton.recurrent_steps import (
    block_after,
    clear_rows,
    in_rows,
    load_part,
    softplus,
    span_of_request,
    step_operands,
    tile_of_state,
)
from pagebinder.custom_ops.triton.ssd import load_token
from pagebinder.custom_ops.triton.values import SIZES


@triton.jit(do_not_specialize=SIZES)
def selective_scan_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, skip_ptr, bias_ptr, out_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr,
    stride_r, num_tokens, num_requests, num_blocks, columns, block_size, stride_n, stride_w, stride_s, stride_x,
    stride_dt, stride_b, stride_c, W, N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """out [T, W] of x and dt [T, W], B and C [T, N], A [W, N]."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    column = tl.arange(0, BLOCK_N)
    is_channel, is_column = channel < W, column < N
    out_ptr += channel
    if request == num_requests:
        clear_rows(out_ptr, is_channel, W, tl.load(starts_ptr + request), num_tokens)
        return
    first, context, end = span_of_request(lens_ptr, starts_ptr, request)
    if context >= end:
        return
    table_ptr += request.to(tl.int64) * stride_r
    state_ptr = cache_ptr + channel[:, None] * stride_w + column[None, :] * stride_s
    mask = is_channel[:, None] & is_column[None, :]
    block = block_after(table_ptr, context, block_size, columns, num_blocks)
    state = load_part(state_ptr + block * stride_n, mask & (block > 0))
    rate = tl.load(a_ptr + channel[:, None] * N + column[None, :], mask=mask, other=0.0).to(tl.float32)
    bias, skip = 0.0, 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    x_ptr += first * stride_x + channel
    dt_ptr += first * stride_dt + channel
    b_ptr += first * stride_b + column
    c_ptr += first * stride_c + column
    out_ptr += first * W
    x, dt, b, c = load_token(x_ptr, dt_ptr, b_ptr, c_ptr, is_channel, is_channel, is_column, True)
    p = context
    while p < end:
        stop = tl.minimum((p // block_size + 1) * block_size, end)
        for t in tl.range(p, stop):
            x_ptr += stride_x
            dt_ptr += stride_dt
            b_ptr += stride_b
            c_ptr += stride_c
            next_x, next_dt, next_b, next_c = load_token(
                x_ptr, dt_ptr, b_ptr, c_ptr, is_channel, is_channel, is_column, t + 1 < end
            )
            dt += bias
            if SOFTPLUS:
                dt = softplus(dt)
            state = tl.exp(dt[:, None] * rate) * state + (dt * x)[:, None] * b[None, :]
            tl.store(out_ptr, tl.sum(state * c[None, :], 1) + skip * x, mask=is_channel)
            out_ptr += W
            x, dt, b, c = next_x, next_dt, next_b, next_c
        block = block_after(table_ptr, stop, block_size, columns, num_blocks)
        tl.store(state_ptr + block * stride_n, state, mask=mask & (block > 0))
        p = stop


def paged_selective_scan(
    x, dt, B, C, A, D, dt_bias, cache, block_table, seq_lens, query_start_loc, *, block_size, dt_softplus
):
    """See `diagonal.selective_scan` and `Recurrence.run_paged`."""
    recurrence = RECURRENCES[torch.ops.pagebinder.selective_scan.default]
    recurrence.check_paged((x, dt, B, C, A, D, dt_bias), cache)
    metadata = (block_table, seq_lens, query_start_loc)
    step = step_operands(cache, *metadata, num_tokens=len(x), block_size=block_size)
    channels, width = x.shape[1], B.shape[1]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    x, dt, B, C, D, dt_bias = (in_rows(y) for y in (x, dt, B, C, D, dt_bias))
    # A takes as many registers as the state.
    block_n, block_w, warps = tile_of_state(width, channels)
    selective_scan_kernel[len(seq_lens) + 1, triton.cdiv(channels, block_w)](
        x, dt, B, C, A.contiguous(), D, dt_bias, out, cache, *step, *cache.stride(), x.stride(0), dt.stride(0),
        B.stride(0), C.stride(0), channels, N=width, BLOCK_W=block_w, BLOCK_N=block_n, SOFTPLUS=dt_softplus,
        num_warps=warps,
    )  # fmt: skip
    return out
