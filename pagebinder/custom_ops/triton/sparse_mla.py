"""`pagebinder_triton::sparse_mla_attention`: recent tokens and listed entries of latent rows, in one softmax.

    grid [T, groups of heads * splits]     a program: one query token, up to BLOCK_M of its heads, a part of its rows

    rows of a query      tokens p - WINDOW < j <= p      entries listed, or all w < (p + 1) // RATIO
    tiles of BLOCK_N     |  0  |  1  |  2 .. |           |  3  |  4  |  5  |  6 ...
    splits               |_____ 0 _____|_____ 1 _________________|_____ 2 _____ ...        merged with the sink

All heads share a row, and its leading part is the value, so a tile is fetched row by row, decoded once and used in
both products. Launches follow from shapes: lists are walked to their end, and rows that are not there are not read.
The reference's checks of lengths and block ids, which would wait for the device, are not made; what is out of range
is left out. With float16 queries, rows of bytes are taken as float16.

    a tile's turn      wait for its rows | start the copies of the next tile's | (decode) | scores | softmax | values

    heads x rows, warps, stages by the bytes of a row, padded     <= 256: 64 x 64, 4, 3     <= 1024: 64 x 64, 8, 2
                                                                  <= 1152: 64 x 32, 8, 3    float32: 16 x 32, 8, 2
    before Hopper, where these do not fit                         64 x 16, 8, 2

Compiled for compute capability 9.0 (Triton 3.6), 64 heads of 512, a tile of 64 rows takes a warp 831 instructions
over bf16 rows and 1,445 over 584-byte rows, a program 201 and 218 KiB of shared memory; nothing is spilled. On an
H200 256 requests run at 256 and 177 TFLOP/s, where the forerunner (2 x 1,188 and 2 x 1,501 instructions, scores
computed twice in products 16 wide, copies waited for) ran at 131 and 93.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.latent.layouts import require, rows_per_block
from pagebinder.custom_ops.sparse.sparse_mla import check_operands
from pagebinder.custom_ops.triton.attention_kernels import load_queries, nonzero, with_sink
from pagebinder.custom_ops.triton.gpu import HOPPER, capability, multiprocessors, round_splits
from pagebinder.custom_ops.triton.latent_rows import (
    RowSizes,
    cache_strides,
    is_aligned,
    offsets_in_block,
)
from pagebinder.custom_ops.triton.paged_attention import Widths, padded
from pagebinder.custom_ops.triton.sparse_rows import (
    list_rows_kernel,
    position_of,
    rows_of_tile,
    tiles_of_query,
)
from pagebinder.custom_ops.triton.stored_rows import fetch_row_part, row_part
from pagebinder.custom_ops.triton.unified_kernels import merge_states_kernel
from pagebinder.custom_ops.triton.values import LN_2, LOG2_E, SIZES, product, rounded

# (bytes of a padded row at most, heads, rows, warps, stages)
TILES = ((256, 64, 64, 4, 3), (1024, 64, 64, 8, 2), (1024 + 128, 64, 32, 8, 3), (None, 16, 32, 8, 2))
ROWS_BEFORE_HOPPER, STAGES_BEFORE_HOPPER = 16, 2  # of the tiles of 8 warps in 16 bits
LAYOUTS = ("plain", "fp8_v4", "fp8_v32")
PROGRAMS_PER_MULTIPROCESSOR = 2  # of 4 warps, aimed at by splitting; 8 warps have all of its registers
MIN_ROWS_OF_SPLIT = 64
MAX_SPLITS = 64
ROWS_OF_PROGRAM = 1024  # that `list_rows_kernel` looks up


@triton.jit
def scores(q_a, q_b, k_a, k_b, here, scale, D_B: tl.constexpr):
    """[heads, rows] in bits (log2)."""
    zeros = tl.zeros((q_a.shape[0], here.shape[0]), tl.float32)
    s = product(q_a, tl.trans(k_a), zeros) * (scale * LOG2_E)
    if D_B > 0:  # added as it is scaled: what is added as it is would make a chain of the products
        s += product(q_b, tl.trans(k_b), zeros) * (scale * LOG2_E)
    return tl.where(here[None, :], s, float("-inf"))


@triton.jit
def add_rows(
    q_a, q_b, k_a, k_b, here, acc_a, acc_b, m, l, scale, is_apart, DV: tl.constexpr, CUT: tl.constexpr,
    D_B: tl.constexpr,
):  # fmt: skip
    """A tile of rows joins the running softmax. is_apart: True, which only the caller knows.

    Where Triton sees that one product leads to another, each group of four warps computes all scores of 64 heads. A
    block of their own hides that from it: of 8 warps each half computes half of the scores.
    """
    weights = tl.zeros((q_a.shape[0], here.shape[0]), q_a.dtype)
    keep = tl.zeros(m.shape, tl.float32)
    if is_apart:
        s = scores(q_a, q_b, k_a, k_b, here, scale, D_B)
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        exponentials = tl.exp2(s - shift[:, None])
        keep = tl.exp2(m - shift)
        l = l * keep + tl.sum(exponentials, 1)
        m = m_new
        weights = rounded(exponentials, q_a.dtype)
    acc_a = product(weights, k_a, acc_a * keep[:, None])
    if DV > CUT:
        acc_b = product(weights, k_b, acc_b * keep[:, None])
    return acc_a, acc_b, m, l


@triton.jit(do_not_specialize=SIZES)
def sparse_kernel(
    q_ptr, window_ptr, window_table_ptr, entry_ptr, entry_table_ptr, rows_ptr, positions_ptr, lens_ptr, starts_ptr,
    sinks_ptr, out_ptr, lse_ptr, stride_qt, stride_qh, window_stride_r, entry_stride_r, num_tokens, num_requests,
    window_blocks, window_capacity, entry_blocks, entry_capacity, scale, window_stride_n: tl.constexpr,
    window_stride_b: tl.constexpr, entry_stride_n: tl.constexpr, entry_stride_b: tl.constexpr,
    WINDOW_N: tl.constexpr, ENTRY_N: tl.constexpr, WINDOW: tl.constexpr, ENTRY_WINDOW: tl.constexpr,
    RATIO: tl.constexpr, LISTED: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, CUT: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr, BLOCK_DV: tl.constexpr,
    LAYOUT: tl.constexpr, NOPE: tl.constexpr, QUANT: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, NATIVE: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [T, H, DV] with the sink; of several splits out [SPLITS, T, H, DV] float32 and lse [SPLITS, H, T], without.

    Splits without rows only get an LSE of -inf, and zeros. rows, positions: of `list_rows_kernel`, if entries
    are listed.
    """
    token = tl.num_programs(0) - 1 - tl.program_id(0)  # long contexts first
    split = tl.program_id(1) % SPLITS
    head = tl.program_id(1) // SPLITS * BLOCK_M + tl.arange(0, BLOCK_M)
    has_head = head < H
    if LISTED is None:
        request, p = position_of(starts_ptr, lens_ptr, token, num_requests)
        window_table_ptr += request.to(tl.int64) * window_stride_r
        entry_table_ptr += request.to(tl.int64) * entry_stride_r
    else:
        p = tl.load(positions_ptr + token)
        rows_ptr += token.to(tl.int64) * ROWS
    window_tiles, num_tiles = tiles_of_query(
        p, window_capacity, entry_capacity, WINDOW, RATIO, LISTED, BLOCK_N
    )
    of_split = tl.cdiv(num_tiles, SPLITS)
    q_a, q_b = load_queries(q_ptr, stride_qt, stride_qh, token, head, has_head, D, CUT, D_A, D_B)
    acc_a = tl.zeros((BLOCK_M, D_A), tl.float32)
    BLOCK_B: tl.constexpr = D_B if DV > CUT else 16
    acc_b = tl.zeros((BLOCK_M, BLOCK_B), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    # One loop over both caches: the accumulators do not move between two. What is done with a tile is a block, which
    # Triton's pipeline puts behind the loads of the next one. What is hoisted out of the loop would be spilled.
    for tile in tl.range(split * of_split, (split + 1) * of_split, num_stages=STAGES, disable_licm=True):
        is_tile = tile < num_tiles
        of_window = tile < window_tiles
        if LISTED is None:
            block, x, here = rows_of_tile(
                tile, window_tiles, p, window_table_ptr, entry_table_ptr, window_blocks, window_capacity,
                entry_blocks, entry_capacity, WINDOW_N, ENTRY_N, WINDOW, ENTRY_WINDOW, RATIO, BLOCK_N,
            )  # fmt: skip
        else:
            row = tl.load(rows_ptr + tile * BLOCK_N + tl.arange(0, BLOCK_N), mask=is_tile, other=-1)
            x, here = row.to(tl.uint32), row >= 0
            block = x // WINDOW_N if WINDOW_N == ENTRY_N else tl.where(of_window, x // WINDOW_N, x // ENTRY_N)
        stride_n = tl.where(of_window, window_stride_n, entry_stride_n)
        block_ptrs = tl.where(of_window, window_ptr, entry_ptr) + block.to(tl.int64) * stride_n
        at, scales_at = offsets_in_block(
            x % WINDOW_N, window_stride_b, WINDOW_N, LAYOUT, ROW_BYTES, SCALE_BYTES
        )
        w_at, w_scales_at = offsets_in_block(
            x % ENTRY_N, entry_stride_b, ENTRY_N, LAYOUT, ROW_BYTES, SCALE_BYTES
        )
        row_ptrs = block_ptrs + tl.where(of_window, at, w_at)
        scale_ptrs = block_ptrs + tl.where(of_window, scales_at, w_scales_at)
        dtype: tl.constexpr = q_ptr.dtype.element_ty
        stored_a = fetch_row_part(row_ptrs, scale_ptrs, here, 0, CUT, D_A, LAYOUT, NOPE, QUANT, ALIGNED)
        stored_b = stored_a
        if D_B > 0:
            stored_b = fetch_row_part(row_ptrs, scale_ptrs, here, CUT, D, D_B, LAYOUT, NOPE, QUANT, ALIGNED)
        if is_tile:
            k_a = row_part(stored_a, dtype, 0, CUT, D_A, LAYOUT, NOPE, QUANT, NATIVE)
            k_b = k_a
            if D_B > 0:
                k_b = row_part(stored_b, dtype, CUT, D, D_B, LAYOUT, NOPE, QUANT, NATIVE)
            acc_a, acc_b, m, l = add_rows(
                q_a, q_b, k_a, k_b, here, acc_a, acc_b, m, l, scale, num_tiles > 0, DV, CUT, D_B
            )
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
    sizes_of_row = RowSizes.of(layout, width, rope_dim, q.device)
    # What is rotated is one group of channels among the others, or a part of its own.
    widths = Widths.of(width, head_dim_v, sizes_of_row.NOPE if rope_dim > sizes_of_row.QUANT > 1 else None)
    heads, rows, warps, stages = _tile(widths, num_heads, q.dtype, q.device)
    groups = triton.cdiv(num_heads, heads)
    listed = None if indices is None else indices.shape[1]
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
    splits = num_splits(num_tokens * groups, most, warps, q.device)
    result, lses = out, None
    if splits > 1:
        out = torch.empty((splits, num_tokens, num_heads, head_dim_v), dtype=torch.float32, device=q.device)
        lses = torch.empty((splits, num_heads, num_tokens), dtype=torch.float32, device=q.device)
    strides = (window_rows[1].stride(0), entry_rows[1].stride(0))
    bounds = (len(window_rows[0]), capacities[0], len(entry_rows[0]), capacities[1])
    masks = dict(WINDOW=window, ENTRY_WINDOW=entry_window, RATIO=ratio, LISTED=listed, BLOCK_N=rows)
    num_rows = (triton.cdiv(min(window, capacities[0]), rows) + triton.cdiv(listed or 0, rows)) * rows
    row_list, positions = None, None
    if indices is not None:
        row_list = torch.empty((num_tokens, num_rows), dtype=torch.int32, device=q.device)
        positions = torch.empty(num_tokens, dtype=torch.int32, device=q.device)
        list_rows_kernel[num_tokens, triton.cdiv(num_rows, ROWS_OF_PROGRAM)](
            window_rows[1], entry_rows[1], indices, seq_lens, query_start_loc, row_list, positions, *strides,
            indices.stride(0), len(seq_lens), *bounds, WINDOW_N=sizes["WINDOW_N"], ENTRY_N=sizes["ENTRY_N"],
            ROWS=num_rows, PART=ROWS_OF_PROGRAM, **masks,
        )  # fmt: skip
    sparse_kernel[num_tokens, groups * splits](
        q, *window_rows, *entry_rows, row_list, positions, seq_lens, query_start_loc, None if splits > 1 else sinks,
        out, lses, *q.stride()[:2], *strides, num_tokens, len(seq_lens), *bounds, scale, **sizes, **masks,
        ROWS=num_rows, SPLITS=splits, H=num_heads, BLOCK_M=heads, **vars(widths), **vars(sizes_of_row),
        ALIGNED=is_aligned(window_rows[0], entry_rows[0]), STAGES=stages, num_warps=warps,
    )  # fmt: skip
    if splits > 1:
        merge_states_kernel[num_tokens, num_heads](
            out, lses, sinks, result, None, num_tokens, PARTS=splits, DV=head_dim_v, BLOCK_DV=padded(head_dim_v),
            num_warps=1,
        )  # fmt: skip
    return result


def _tile(
    widths: Widths, num_heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, int, int, int]:
    """(heads, rows, warps, stages) of TILES; no more heads than there are."""
    row = (widths.D_A + widths.D_B) * dtype.itemsize if dtype.itemsize == 2 else None
    limit_of = (tile for limit, *tile in TILES if limit is None or (row is not None and row <= limit))
    heads, rows, warps, stages = next(limit_of)
    if row is not None and warps == 8 and 0 < capability(device)[0] < HOPPER[0]:
        rows, stages = ROWS_BEFORE_HOPPER, STAGES_BEFORE_HOPPER
    return min(heads, padded(num_heads)), rows, warps, stages


def num_splits(programs: int, rows: int, warps: int, device: torch.device) -> int:
    """Parts of up to `rows` rows of a query, when `programs` would run without splitting."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR * 4 * multiprocessors(device) // (warps * max(programs, 1))
    return round_splits(max(1, min(wanted, rows // MIN_ROWS_OF_SPLIT, MAX_SPLITS)))
