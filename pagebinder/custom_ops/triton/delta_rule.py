"""`pagebinder_triton::paged_gated_delta_rule`: a program takes some columns of a head's state, token by token.

    grid [R + 1, H, column tiles]
    columns are independent: u and o of a column need its own values of the state only

Operands of the next token are on their way while one is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.recurrent.gated_delta_rule import check_paged_gated_delta_rule
from pagebinder.custom_ops.triton.recurrent_steps import (
    block_after,
    clear_rows,
    in_rows,
    load_part,
    span_of_request,
    step_operands,
    tile_of_state,
)
from pagebinder.custom_ops.triton.values import SIZES, rounded


@triton.jit
def load_token(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, is_row, is_column, exists, ROW_DECAY: tl.constexpr):
    """(q, k [K], v [V], decay, beta) in float32 of a token, if it exists."""
    q = tl.load(q_ptr, mask=is_row & exists, other=0.0).to(tl.float32)
    k = tl.load(k_ptr, mask=is_row & exists, other=0.0).to(tl.float32)
    v = tl.load(v_ptr, mask=is_column & exists, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr, mask=exists, other=0.0).to(tl.float32)
    g = tl.load(g_ptr, mask=is_row & exists if ROW_DECAY else exists, other=0.0).to(tl.float32)
    return q, k, v, tl.exp(g), beta


@triton.jit(do_not_specialize=SIZES)
def delta_rule_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr, stride_r, num_tokens,
    num_requests, num_blocks, columns, block_size, stride_n, stride_h, stride_k, stride_v, stride_qt, stride_qg,
    stride_kt, stride_kg, stride_vt, stride_vh, stride_gt, stride_gh, stride_bt, scale, norm_eps, GROUP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROW_DECAY: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """out [T, H, DV]; beta is [T, H], g the same or (ROW_DECAY) [T, H, DK]; GROUP value heads read one key head."""
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
    state_ptr = cache_ptr + head * stride_h + row[:, None] * stride_k + column[None, :] * stride_v
    mask = is_row[:, None] & is_column[None, :]
    block = block_after(table_ptr, context, block_size, columns, num_blocks)
    state = load_part(state_ptr + block * stride_n, mask & (block > 0))
    q_ptr += first * stride_qt + head // GROUP * stride_qg + row
    k_ptr += first * stride_kt + head // GROUP * stride_kg + row
    v_ptr += first * stride_vt + head * stride_vh + column
    g_ptr += first * stride_gt + head * stride_gh
    if ROW_DECAY:
        g_ptr += row
    beta_ptr += first * stride_bt + head
    out_ptr += first * stride_out
    q, k, v, decay, beta = load_token(
        q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, is_row, is_column, True, ROW_DECAY
    )
    p = context
    while p < end:
        stop = tl.minimum((p // block_size + 1) * block_size, end)
        for t in tl.range(p, stop):
            q_ptr += stride_qt
            k_ptr += stride_kt
            v_ptr += stride_vt
            g_ptr += stride_gt
            beta_ptr += stride_bt
            next_q, next_k, next_v, next_decay, next_beta = load_token(
                q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, is_row, is_column, t + 1 < end, ROW_DECAY
            )
            if NORMALISE:
                q *= tl.rsqrt(tl.sum(q * q, 0) + norm_eps)
                k *= tl.rsqrt(tl.sum(k * k, 0) + norm_eps)
            state *= decay[:, None] if ROW_DECAY else decay
            u = beta * (v - tl.sum(state * k[:, None], 0))
            state += k[:, None] * u[None, :]
            out = scale * tl.sum(state * q[:, None], 0)
            tl.store(out_ptr, rounded(out, out_ptr.dtype.element_ty), mask=is_column)
            out_ptr += stride_out
            q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta
        block = block_after(table_ptr, stop, block_size, columns, num_blocks)
        tl.store(state_ptr + block * stride_n, state, mask=mask & (block > 0))
        p = stop


def paged_gated_delta_rule(
    q, k, v, g, beta, cache, block_table, seq_lens, query_start_loc, *, block_size, scale, l2norm_eps=None
):
    """See `paged_gated_delta_rule_reference`."""
    check_paged_gated_delta_rule(q, k, v, g, beta, cache)
    metadata = (block_table, seq_lens, query_start_loc)
    step = step_operands(cache, *metadata, num_tokens=len(q), block_size=block_size)
    (num_heads, width_v), width = v.shape[1:], q.shape[2]
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, k, v, g, beta = (in_rows(x) for x in (q, k, v, g, beta))
    block_k, block_v, warps = tile_of_state(width, width_v)
    grid = (len(seq_lens) + 1, num_heads, triton.cdiv(width_v, block_v))
    delta_rule_kernel[grid](
        q, k, v, g, beta, out, cache, *step, *cache.stride(), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *g.stride()[:2], beta.stride(0), scale, l2norm_eps or 0.0, GROUP=num_heads // q.shape[1], DK=width,
        DV=width_v, BLOCK_K=block_k, BLOCK_V=block_v, ROW_DECAY=g.dim() == 3, NORMALISE=l2norm_eps is not None,
        num_warps=warps,
    )  # fmt: skip
    return out
