"""`pagebinder_triton::paged_ssd`: a program takes some rows of a head's state, token by token.

    grid [R + 1, H, row tiles]
    rows are independent: y of a row needs its own values of the state only

Operands of the next token are on their way while one is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.recurrent.define import require
from pagebinder.custom_ops.recurrent.ssd import check_paged_ssd
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
from pagebinder.custom_ops.triton.values import SIZES


@triton.jit
def load_token(x_ptr, dt_ptr, b_ptr, c_ptr, is_row, is_dt, is_column, exists):
    """(x [P], dt, B, C [N]) in float32 of a token, if it exists."""
    x = tl.load(x_ptr, mask=is_row & exists, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr, mask=is_dt & exists, other=0.0).to(tl.float32)
    b = tl.load(b_ptr, mask=is_column & exists, other=0.0).to(tl.float32)
    c = tl.load(c_ptr, mask=is_column & exists, other=0.0).to(tl.float32)
    return x, dt, b, c


@triton.jit(do_not_specialize=SIZES)
def ssd_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, skip_ptr, bias_ptr, out_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr,
    stride_r, num_tokens, num_requests, num_blocks, columns, block_size, stride_n, stride_h, stride_p, stride_s,
    stride_xt, stride_xh, stride_dt, stride_bt, stride_bg, stride_ct, stride_cg, dt_min, dt_max, GROUP: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """out [T, H, P]; GROUP heads read one B and C. dt_max: None: no limit."""
    request, head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_N)
    is_row, is_column = row < P, column < N
    stride_out = tl.num_programs(1) * P
    out_ptr += head * P + row
    if request == num_requests:
        clear_rows(out_ptr, is_row, stride_out, tl.load(starts_ptr + request), num_tokens)
        return
    first, context, end = span_of_request(lens_ptr, starts_ptr, request)
    if context >= end:
        return
    table_ptr += request.to(tl.int64) * stride_r
    state_ptr = cache_ptr + head * stride_h + row[:, None] * stride_p + column[None, :] * stride_s
    mask = is_row[:, None] & is_column[None, :]
    block = block_after(table_ptr, context, block_size, columns, num_blocks)
    state = load_part(state_ptr + block * stride_n, mask & (block > 0))
    rate = tl.load(a_ptr + head).to(tl.float32)
    bias, skip = 0.0, 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + head).to(tl.float32)
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + head).to(tl.float32)
    x_ptr += first * stride_xt + head * stride_xh + row
    dt_ptr += first * stride_dt + head
    b_ptr += first * stride_bt + head // GROUP * stride_bg + column
    c_ptr += first * stride_ct + head // GROUP * stride_cg + column
    out_ptr += first * stride_out
    x, dt, b, c = load_token(x_ptr, dt_ptr, b_ptr, c_ptr, is_row, True, is_column, True)
    p = context
    while p < end:
        stop = tl.minimum((p // block_size + 1) * block_size, end)
        for t in tl.range(p, stop):
            x_ptr += stride_xt
            dt_ptr += stride_dt
            b_ptr += stride_bt
            c_ptr += stride_ct
            next_x, next_dt, next_b, next_c = load_token(
                x_ptr, dt_ptr, b_ptr, c_ptr, is_row, True, is_column, t + 1 < end
            )
            dt += bias
            if SOFTPLUS:
                dt = softplus(dt)
            dt = tl.maximum(dt, dt_min)
            if dt_max is not None:
                dt = tl.minimum(dt, dt_max)
            state = tl.exp(dt * rate) * state + (dt * x)[:, None] * b[None, :]
            tl.store(out_ptr, tl.sum(state * c[None, :], 1) + skip * x, mask=is_row)
            out_ptr += stride_out
            x, dt, b, c = next_x, next_dt, next_b, next_c
        block = block_after(table_ptr, stop, block_size, columns, num_blocks)
        tl.store(state_ptr + block * stride_n, state, mask=mask & (block > 0))
        p = stop


def paged_ssd(
    x, dt, A, B, C, D, dt_bias, cache, block_table, seq_lens, query_start_loc, *, block_size, dt_softplus, dt_min=0.0,
    dt_max=None,
):  # fmt: skip
    """See `paged_ssd_reference`."""
    check_paged_ssd(x, dt, A, B, C, cache)
    for weight in (D, dt_bias):
        require(weight is None or weight.shape == A.shape, "D and dt_bias are [H]")
    metadata = (block_table, seq_lens, query_start_loc)
    step = step_operands(cache, *metadata, num_tokens=len(x), block_size=block_size)
    (num_heads, head_width), width = x.shape[1:], B.shape[2]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    x, dt, A, B, C, D, dt_bias = (in_rows(y) for y in (x, dt, A, B, C, D, dt_bias))
    block_n, block_p, warps = tile_of_state(width, head_width)
    grid = (len(seq_lens) + 1, num_heads, triton.cdiv(head_width, block_p))
    ssd_kernel[grid](
        x, dt, A, B, C, D, dt_bias, out, cache, *step, *cache.stride(), *x.stride()[:2], dt.stride(0),
        *B.stride()[:2], *C.stride()[:2], dt_min, dt_max, GROUP=num_heads // B.shape[1], P=head_width, N=width,
        BLOCK_P=block_p, BLOCK_N=block_n, SOFTPLUS=dt_softplus, num_warps=warps,
    )  # fmt: skip
    return out
