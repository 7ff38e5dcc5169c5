"""`pagebinder_triton::paged_mlstm`: a program takes some columns of a head's memory, token by token.

    start_kernel   grid [R, H]                      the last column and m of the states that requests start from
    mlstm_kernel   grid [R + 1, H, column tiles]    the memory; every program follows the last column and m as well

Every output divides by the last column, so all programs of a head read it, and one writes it: a copy is made before,
as a step may end in the block that it began in. Operands of the next token are on their way while one is computed.
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
from pagebinder.custom_ops.triton.values import SIZES, rounded


@triton.jit(do_not_specialize=SIZES)
def start_kernel(
    cache_ptr, start_ptr, table_ptr, lens_ptr, starts_ptr, stride_r, num_tokens, num_requests, num_blocks, columns,
    block_size, stride_n, stride_h, stride_k, stride_v, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """start [R, H, DK + 1]: the last column of a head's state [DK + 1, DV + 1], zeros for requests that begin."""
    request, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_K)
    _, context, end = span_of_request(lens_ptr, starts_ptr, request)
    table_ptr += request.to(tl.int64) * stride_r
    block = block_after(table_ptr, tl.where(context < end, context, 0), block_size, columns, num_blocks)
    from_ptr = cache_ptr + block * stride_n + head * stride_h + DV * stride_v
    column = tl.load(from_ptr + row * stride_k, mask=(row <= DK) & (block > 0), other=0.0)
    to_ptr = start_ptr + (request.to(tl.int64) * tl.num_programs(1) + head) * (DK + 1)
    tl.store(to_ptr + row, column, mask=row <= DK)


@triton.jit
def load_token(q_ptr, k_ptr, v_ptr, i_ptr, f_ptr, is_row, is_column, exists):
    """(q, k [K], v [V], both gates) in float32 of a token, if it exists."""
    q = tl.load(q_ptr, mask=is_row & exists, other=0.0).to(tl.float32)
    k = tl.load(k_ptr, mask=is_row & exists, other=0.0).to(tl.float32)
    v = tl.load(v_ptr, mask=is_column & exists, other=0.0).to(tl.float32)
    i = tl.load(i_ptr, mask=exists, other=0.0).to(tl.float32)
    f = tl.load(f_ptr, mask=exists, other=0.0).to(tl.float32)
    return q, k, v, i, f


@triton.jit(do_not_specialize=SIZES)
def mlstm_kernel(
    q_ptr, k_ptr, v_ptr, i_ptr, f_ptr, out_ptr, cache_ptr, start_ptr, table_ptr, lens_ptr, starts_ptr, stride_r,
    num_tokens, num_requests, num_blocks, columns, block_size, stride_n, stride_h, stride_k, stride_v, stride_qt,
    stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_it, stride_ft, scale, eps, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """out [T, H, DV]; the gates are [T, H]."""
    request, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row, is_column = row < DK, column < DV
    stride_out = tl.num_programs(1) * DV
    out_ptr += head * DV + column
    if request == num_requests:
        clear_rows(out_ptr, is_column, stride_out, tl.load(starts_ptr + request), num_tokens)
        return
    first, context, end = span_of_request(lens_ptr, starts_ptr, request)
    if context >= end:
        return
    table_ptr += request.to(tl.int64) * stride_r
    head_ptr = cache_ptr + head * stride_h
    last_ptr = head_ptr + row * stride_k + DV * stride_v
    state_ptr = head_ptr + row[:, None] * stride_k + column[None, :] * stride_v
    mask = is_row[:, None] & is_column[None, :]
    block = block_after(table_ptr, context, block_size, columns, num_blocks)
    state = load_part(state_ptr + block * stride_n, mask & (block > 0))
    start_ptr += (request.to(tl.int64) * tl.num_programs(1) + head) * (DK + 1)
    last = tl.load(start_ptr + row, mask=is_row, other=0.0)
    m = tl.load(start_ptr + DK)
    q_ptr += first * stride_qt + head * stride_qh + row
    k_ptr += first * stride_kt + head * stride_kh + row
    v_ptr += first * stride_vt + head * stride_vh + column
    i_ptr += first * stride_it + head
    f_ptr += first * stride_ft + head
    out_ptr += first * stride_out
    q, k, v, i, f = load_token(q_ptr, k_ptr, v_ptr, i_ptr, f_ptr, is_row, is_column, True)
    p = context
    while p < end:
        stop = tl.minimum((p // block_size + 1) * block_size, end)
        for t in tl.range(p, stop):
            q_ptr += stride_qt
            k_ptr += stride_kt
            v_ptr += stride_vt
            i_ptr += stride_it
            f_ptr += stride_ft
            next_q, next_k, next_v, next_i, next_f = load_token(
                q_ptr, k_ptr, v_ptr, i_ptr, f_ptr, is_row, is_column, t + 1 < end
            )
            kept = m - softplus(-f)  # m + log(sigmoid(f))
            m = tl.maximum(kept, i)
            forget, write = tl.exp(kept - m), tl.exp(i - m)
            state = forget * state + (write * k)[:, None] * v[None, :]
            last = forget * last + write * k
            q *= scale
            below = tl.maximum(tl.abs(tl.sum(last * q, 0)), tl.exp(-m)) + eps
            out = tl.sum(state * q[:, None], 0) / below
            tl.store(out_ptr, rounded(out, out_ptr.dtype.element_ty), mask=is_column)
            out_ptr += stride_out
            q, k, v, i, f = next_q, next_k, next_v, next_i, next_f
        block = block_after(table_ptr, stop, block_size, columns, num_blocks)
        tl.store(state_ptr + block * stride_n, state, mask=mask & (block > 0))
        unused_ptr = head_ptr + block * stride_n + DK * stride_k + column * stride_v
        tl.store(unused_ptr, 0.0, mask=is_column & (block > 0))
        is_writer = (tl.program_id(2) == 0) & (block > 0)
        tl.store(last_ptr + block * stride_n, last, mask=is_row & is_writer)
        tl.store(head_ptr + block * stride_n + DK * stride_k + DV * stride_v, m, mask=is_writer)
        p = stop


def paged_mlstm(
    q, k, v, igate, fgate, cache, block_table, seq_lens, query_start_loc, *, block_size, scale, eps
):
    """See `mlstm.mlstm_scan` and `Recurrence.run_paged`."""
    RECURRENCES[torch.ops.pagebinder.mlstm.default].check_paged((q, k, v, igate, fgate), cache)
    metadata = (block_table, seq_lens, query_start_loc)
    step = step_operands(cache, *metadata, num_tokens=len(q), block_size=block_size)
    (num_heads, width_v), width = v.shape[1:], q.shape[2]
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, k, v, igate, fgate = (in_rows(x) for x in (q, k, v, igate, fgate))
    start = torch.empty((len(seq_lens), num_heads, width + 1), dtype=torch.float32, device=q.device)
    widths = {"DK": width, "DV": width_v}
    if len(seq_lens):
        block_k = triton.next_power_of_2(width + 1)
        start_kernel[len(seq_lens), num_heads](
            cache, start, *step, *cache.stride(), **widths, BLOCK_K=block_k
        )
    block_k, block_v, warps = tile_of_state(width, width_v)
    mlstm_kernel[len(seq_lens) + 1, num_heads, triton.cdiv(width_v, block_v)](
        q, k, v, igate, fgate, out, cache, start, *step, *cache.stride(), *q.stride()[:2], *k.stride()[:2],
        *v.stride()[:2], igate.stride(0), fgate.stride(0), scale, eps, **widths, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=warps,
    )  # fmt: skip
    return out
