"""`pagebinder_triton::sparse_mla_attention`: recent tokens and listed entries of latent rows, in one softmax.

    grid [T, groups of heads * splits]     a program: one query token, up to BLOCK_M of its heads, a part of its rows

    rows of a query      tokens p - WINDOW < j <= p      entries listed, or all w < (p + 1) // RATIO
    tiles of BLOCK_N     |  0  |  1  |  2 .. |           |  3  |  4  |  5  |  6 ...
    splits               |_____ 0 _____|_____ 1 _________________|_____ 2 _____ ...        merged with the sink

All heads share a row, and its leading part is the value, so a tile is fetched row by row, decoded once and used in
both products. Launches follow from shapes: lists are walked to their end, and rows that are not there are not read.
The reference's checks of lengths and block ids, which would wait for the device, are not made; what is out of range
is left out. With float16 queries, rows of bytes are taken as float16.

    heads x rows, warps, stages by the bytes of a row, padded     <= 256: 64 x 64, 4, 3     <= 1152: 64 x 32, 8, 3
                                                                  beyond, and float32: 16 x 32, 8, 2

Compiled for compute capability 9.0 a program takes 145 KiB of shared memory over rows of bytes, and up to 48 bytes a
thread of registers are spilled (two loops, one for each cache, spill 800). On an H200 256
requests of 64 heads of 512 run at 131 TFLOP/s over bf16 rows, at 93 over 584-byte rows: far from what it could do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.latent.layouts import require, rows_per_block
from pagebinder.custom_ops.sparse.sparse_mla import check_operands
from pagebinder.custom_ops.triton.attention_kernels import load_queries, nonzero, with_sink
from pagebinder.custom_ops.triton.gpu import multiprocessors, round_splits
from pagebinder.custom_ops.triton.latent_rows import (
    RowSizes,
    cache_strides,
    is_aligned,
    load_row_part,
    offsets_in_block,
)
from pagebinder.custom_ops.triton.paged_attention import Widths, padded
from pagebinder.custom_ops.triton.unified_kernels import merge_states_kernel
from pagebinder.custom_ops.triton.values import LN_2, LOG2_E, SIZES, product, rounded

# (bytes of a padded row at most, heads, rows, warps, stages)
TILES = ((256, 64, 64, 4, 3), (1024 + 128, 64, 32, 8, 3), (None, 16, 32, 8, 2))
LAYOUTS = ("plain", "fp8_v4", "fp8_v32")
PROGRAMS_PER_MULTIPROCESSOR = 2  # aimed at by splitting
MIN_ROWS_OF_SPLIT = 64
MAX_SPLITS = 64


@triton.jit
def request_of_token(starts_ptr, token, num_requests):
    """The last r in [0, num_requests] that begins at or before a token; num_requests is padding."""
    first, last = 0, num_requests
    while first < last:
        middle = (first + last + 1) // 2
        if tl.load(starts_ptr + middle) <= token:
            first = middle
        else:
            last = middle - 1
    return first


@triton.jit
def position_of(starts_ptr, lens_ptr, token, num_requests):
    """(request of a token or num_requests, its position; below 0 for padding)."""
    request = request_of_token(starts_ptr, token, num_requests)
    is_token = request < num_requests
    end = tl.load(starts_ptr + request + 1, mask=is_token, other=0)
    p = tl.load(lens_ptr + request, mask=is_token, other=0) - end + token
    return request, tl.where(is_token, tl.maximum(p, -1), -1)


@triton.jit
def add_rows(
    q_a, q_b, acc_a, acc_b, m, l, row_ptrs, scale_ptrs, here, scale, D: tl.constexpr, DV: tl.constexpr,
    CUT: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr, LAYOUT: tl.constexpr, NOPE: tl.constexpr,
    QUANT: tl.constexpr, NATIVE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile of rows joins the running softmax; scores are in bits (log2)."""
    dtype: tl.constexpr = q_a.dtype
    BLOCK_N: tl.constexpr = here.shape[0]
    k_a = load_row_part(row_ptrs, scale_ptrs, here, dtype, 0, CUT, D_A, LAYOUT, NOPE, QUANT, NATIVE, ALIGNED)
    s = product(q_a, tl.trans(k_a), tl.zeros((q_a.shape[0], BLOCK_N), tl.float32))
    k_b = k_a
    if D_B > 0:
        k_b = load_row_part(
            row_ptrs, scale_ptrs, here, dtype, CUT, D, D_B, LAYOUT, NOPE, QUANT, NATIVE, ALIGNED
        )
        s = product(q_b, tl.trans(k_b), s)
    s = tl.where(here[None, :], s * (scale * LOG2_E), float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(s - shift[:, None])
    keep = tl.exp2(m - shift)
    l = l * keep + tl.sum(weights, 1)
    weights = rounded(weights, dtype)
    acc_a = product(weights, k_a, acc_a * keep[:, None])
    if DV > CUT:
        acc_b = product(weights, k_b, acc_b * keep[:, None])
    return acc_a, acc_b, m_new, l


@triton.jit(do_not_specialize=SIZES)
def sparse_kernel(
    q_ptr, window_ptr, window_table_ptr, entry_ptr, entry_table_ptr, indices_ptr, lens_ptr, starts_ptr, sinks_ptr,
    out_ptr, lse_ptr, stride_qt, stride_qh, window_stride_r, entry_stride_r, stride_k, num_tokens, num_requests,
    window_blocks, window_capacity, entry_blocks, entry_capacity, scale, window_stride_n: tl.constexpr,
    window_stride_b: tl.constexpr, entry_stride_n: tl.constexpr, entry_stride_b: tl.constexpr,
    WINDOW_N: tl.constexpr, ENTRY_N: tl.constexpr, WINDOW: tl.constexpr, ENTRY_WINDOW: tl.constexpr,
    RATIO: tl.constexpr, LISTED: tl.constexpr,
    SPLITS: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, CUT: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr, BLOCK_DV: tl.constexpr,
    LAYOUT: tl.constexpr, NOPE: tl.constexpr, QUANT: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, NATIVE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out [T, H, DV] with the sink; of several splits out [SPLITS, T, H, DV] float32 and lse [SPLITS, H, T], without.

    Splits without rows only get an LSE of -inf, and zeros.
    """
    token = tl.num_programs(0) - 1 - tl.program_id(0)  # long contexts first
    split = tl.program_id(1) % SPLITS
    head = tl.program_id(1) // SPLITS * BLOCK_M + tl.arange(0, BLOCK_M)
    has_head = head < H
    request, p = position_of(starts_ptr, lens_ptr, token, num_requests)
    lowest = tl.maximum(p - WINDOW + 1, 0)
    num_window = tl.maximum(tl.minimum(p + 1, window_capacity) - lowest, 0)
    num_visible = tl.minimum((p + 1) // RATIO, entry_capacity)
    num_entries = num_visible if indices_ptr is None else tl.where(num_visible > 0, LISTED, 0)
    window_tiles = tl.cdiv(num_window, BLOCK_N)
    num_tiles = window_tiles + tl.cdiv(num_entries, BLOCK_N)
    of_split = tl.cdiv(num_tiles, SPLITS)
    first = split * of_split
    last = tl.minimum(first + of_split, num_tiles)
    q_a, q_b = load_queries(q_ptr, stride_qt, stride_qh, token, head, has_head, D, CUT, D_A, D_B)
    acc_a = tl.zeros((BLOCK_M, D_A), tl.float32)
    BLOCK_B: tl.constexpr = D_B if DV > CUT else 16
    acc_b = tl.zeros((BLOCK_M, BLOCK_B), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    window_table_ptr += request.to(tl.int64) * window_stride_r
    entry_table_ptr += request.to(tl.int64) * entry_stride_r
    for tile in range(first, last):  # one loop over both: the accumulators do not move between two
        of_window = tile < window_tiles
        j = lowest + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        w = (tile - window_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        if indices_ptr is not None:
            is_listed = (w >= 0) & (w < LISTED)
            w = tl.load(indices_ptr + token.to(tl.int64) * stride_k + w, mask=is_listed, other=-1)
        is_seen = (w >= 0) & (w < num_visible)
        if ENTRY_WINDOW > 0:
            is_seen &= w > p - ENTRY_WINDOW
        here = tl.where(of_window, j < lowest + num_window, is_seen)
        table_ptr = tl.where(of_window, window_table_ptr, entry_table_ptr)
        block = tl.load(table_ptr + tl.where(of_window, j // WINDOW_N, w // ENTRY_N), mask=here, other=-1)
        here &= (block >= 0) & (block < tl.where(of_window, window_blocks, entry_blocks))
        stride_n = tl.where(of_window, window_stride_n, entry_stride_n)
        block_ptrs = tl.where(of_window, window_ptr, entry_ptr) + block.to(tl.int64) * stride_n
        w_at, w_scales_at = offsets_in_block(
            w % ENTRY_N, entry_stride_b, ENTRY_N, LAYOUT, ROW_BYTES, SCALE_BYTES
        )
        at, scales_at = offsets_in_block(
            j % WINDOW_N, window_stride_b, WINDOW_N, LAYOUT, ROW_BYTES, SCALE_BYTES
        )
        at, scales_at = tl.where(of_window, at, w_at), tl.where(of_window, scales_at, w_scales_at)
        acc_a, acc_b, m, l = add_rows(
            q_a, q_b, acc_a, acc_b, m, l, block_ptrs + at, block_ptrs + scales_at, here, scale, D, DV, CUT, D_A, D_B,
            LAYOUT, NOPE, QUANT, NATIVE, ALIGNED,
        )  # fmt: skip
    if SPLITS > 1:
        factor = 1.0 / nonzero(l)
        out_ptr += split.to(tl.int64) * num_tokens * H * DV
        lse = (m + tl.log2(nonzero(l))) * LN_2
        tl.store(lse_ptr + (split.to(tl.int64) * H + head) * num_tokens + token, lse, mask=has_head)
    else:
        total, weight = with_sink(l, m, sinks_ptr, head, has_head)
        factor = weight / nonzero(total)
    row_ptrs = out_ptr + (token.to(tl.int64) * H + head)[:, None] * DV
    IN_A: tl.constexpr = CUT if DV > CUT else DV
    column = tl.arange(0, D_A)[None, :]
    mask = has_head[:, None] & (column < IN_A)
    tl.store(row_ptrs + column, rounded(acc_a * factor[:, None], out_ptr.dtype.element_ty), mask=mask)
    if DV > CUT:
        column = CUT + tl.arange(0, D_B)[None, :]
        mask = has_head[:, None] & (column < DV)
        tl.store(row_ptrs + column, rounded(acc_b * factor[:, None], out_ptr.dtype.element_ty), mask=mask)


def sparse_mla_attention(
    q, window_cache, window_table, entry_cache, entry_table, indices, seq_lens, query_start_loc, sinks, *, scale,
    window, ratio, head_dim_v, layout="plain", rope_dim=0, entry_window=0,
):  # fmt: skip
    """See `sparse_mla_attention_reference`; entry_window: entries of ratio 1 are seen as tokens in a window are."""
    check_operands(
        q, window_cache, window_table, entry_cache, entry_table, indices, seq_lens, query_start_loc, sinks, window,
        ratio, head_dim_v,
    )  # fmt: skip
    require(layout in LAYOUTS, f"there is no kernel for the layout {layout}")
    num_tokens, num_heads, width = q.shape
    out = torch.empty((num_tokens, num_heads, head_dim_v), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    if indices is not None and indices.stride(1) != 1:
        indices = indices.contiguous()
    widths = Widths.of(width, head_dim_v)
    heads, rows, warps, stages = _tile(widths, num_heads, q.dtype)
    groups = triton.cdiv(num_heads, heads)
    listed = 0 if indices is None else indices.shape[1]
    # A cache that is not there is the other one, of which no row counts.
    window_rows = (window_cache, window_table) if window > 0 else (entry_cache, entry_table)
    entry_rows = window_rows if entry_cache is None else (entry_cache, entry_table)
    if window_rows[0] is None:
        return out.zero_()
    sizes, capacities = {}, []
    for name, (cache, table) in (("window", window_rows), ("entry", entry_rows)):
        n = rows_per_block(cache, layout, width, rope_dim)
        sizes |= zip(
            (f"{name}_stride_n", f"{name}_stride_b", f"{name.upper()}_N"), (*cache_strides(cache), n)
        )
        capacities.append(table.shape[1] * n)
    capacities[1] *= entry_cache is not None
    most = min(window, capacities[0]) + (capacities[1] if indices is None else listed)
    splits = num_splits(num_tokens * groups, most, q.device)
    result, lses = out, None
    if splits > 1:
        out = torch.empty((splits, num_tokens, num_heads, head_dim_v), dtype=torch.float32, device=q.device)
        lses = torch.empty((splits, num_heads, num_tokens), dtype=torch.float32, device=q.device)
    strides = (window_rows[1].stride(0), entry_rows[1].stride(0), 0 if indices is None else indices.stride(0))
    sparse_kernel[num_tokens, groups * splits](
        q, *window_rows, *entry_rows, indices, seq_lens, query_start_loc, None if splits > 1 else sinks, out, lses,
        *q.stride()[:2], *strides, num_tokens, len(seq_lens), len(window_rows[0]), capacities[0], len(entry_rows[0]),
        capacities[1], scale, **sizes, WINDOW=window, ENTRY_WINDOW=entry_window, RATIO=ratio, LISTED=listed,
        SPLITS=splits, H=num_heads, BLOCK_M=heads, BLOCK_N=rows, **vars(widths),
        **vars(RowSizes.of(layout, width, rope_dim, q.device)), ALIGNED=is_aligned(window_rows[0], entry_rows[0]),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        merge_states_kernel[num_tokens, num_heads](
            out, lses, sinks, result, None, num_tokens, PARTS=splits, DV=head_dim_v, BLOCK_DV=padded(head_dim_v),
            num_warps=1,
        )  # fmt: skip
    return result


def _tile(widths: Widths, num_heads: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(heads, rows, warps, stages) of TILES; no more heads than there are."""
    row = (widths.D_A + widths.D_B) * dtype.itemsize if dtype.itemsize == 2 else None
    limit_of = (tile for limit, *tile in TILES if limit is None or (row is not None and row <= limit))
    heads, *others = next(limit_of)
    return (min(heads, padded(num_heads)), *others)


def num_splits(programs: int, rows: int, device: torch.device) -> int:
    """Parts of up to `rows` rows of a query, when `programs` would run without splitting."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // max(programs, 1)
    return round_splits(max(1, min(wanted, rows // MIN_ROWS_OF_SPLIT, MAX_SPLITS)))
