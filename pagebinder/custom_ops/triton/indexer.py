"""`pagebinder_triton::indexer_score_topk`: scores of a query's entries, and the largest of them in order.

    requantise_kernel   grid [rows of q]              over quantised keys: queries as those, in bfloat16
    score_kernel        grid [tiles of tokens, P]     scores [tokens, entries]: a tile of keys for all of its tokens
    select_kernel       grid [tokens]                 radix select, then one ordered pass

    a score as 32 bits that sort like it   | 8 | 8 | 8 | 8 |   histograms find the topk-th largest, digit by digit
    a pass over the entries                larger ones, and the first of those that are equal to it, in order

So ties go to the lowest index, and nothing is sorted. Grids follow from shapes; the scores of a launch are bounded
by bytes, so long prompts over long contexts take several. A query that sees no more than topk entries gets them all,
unscored. The reference's checks of lengths and block ids are not made: an entry that is not there scores 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.latent.layouts import require, rows_per_block
from pagebinder.custom_ops.sparse.indexer import LAYOUTS, check_operands
from pagebinder.custom_ops.triton.attention_tile import load_columns
from pagebinder.custom_ops.triton.gpu import multiprocessors
from pagebinder.custom_ops.triton.latent_rows import (
    RowSizes,
    cache_strides,
    code_values,
    from_ue8m0,
    is_aligned,
    load_rows,
    offsets_in_block,
    scaled_codes,
)
from pagebinder.custom_ops.triton.paged_attention import padded
from pagebinder.custom_ops.triton.sparse_rows import position_of
from pagebinder.custom_ops.triton.values import SIZES, e2m1_values, product, rounded, through

SCORE_BYTES = 256 << 20  # of one launch
PROGRAMS_PER_MULTIPROCESSOR = 8
MAX_TILE_TOKENS = 16
TILE_KEYS = 128  # in 16 bits; half of them in float32
TILE_HEADS = 64
REQUANTISED_ROWS = 8


@triton.jit(do_not_specialize=SIZES)
def requantise_kernel(
    q_ptr, out_ptr, stride_t, stride_h, num_rows, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, LAYOUT: tl.constexpr, QUANT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    row_ptrs = q_ptr + (row // H).to(tl.int64) * stride_t + (row % H).to(tl.int64) * stride_h
    x = through(load_columns(row_ptrs, is_row, 0, D, BLOCK).to(tl.float32), tl.bfloat16)
    codes, exponent = scaled_codes(tl.reshape(x, (ROWS, BLOCK // QUANT, QUANT)), LAYOUT, NATIVE)
    values = e2m1_values(codes) if LAYOUT == "fp4_index" else code_values(codes, NATIVE)
    x = tl.reshape(values * from_ue8m0(exponent + 127)[:, :, None], (ROWS, BLOCK))
    column = tl.arange(0, BLOCK)[None, :]
    out = rounded(x, tl.bfloat16)
    tl.store(out_ptr + row[:, None].to(tl.int64) * D + column, out, mask=is_row[:, None] & (column < D))


@triton.jit(do_not_specialize=SIZES)
def score_kernel(
    q_ptr, weights_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr, scores_ptr, stride_qt, stride_qh, stride_wt,
    stride_wh, stride_r, first_token, end_token, num_requests, num_blocks, capacity, scale, stride_n: tl.constexpr,
    stride_b: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr, TOPK: tl.constexpr, H: tl.constexpr,
    BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    LAYOUT: tl.constexpr, NOPE: tl.constexpr, QUANT: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, NATIVE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """scores [end_token - first_token, capacity]: written where a token that sees more than TOPK entries sees one."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    token = first_token + tl.program_id(0) * BLOCK_Q
    stop = tl.minimum(token + BLOCK_Q, end_token)
    while token < stop:
        request, p = position_of(starts_ptr, lens_ptr, token, num_requests)
        end = tl.load(starts_ptr + request + 1, mask=request < num_requests, other=0)
        end = tl.where(request < num_requests, tl.minimum(end, stop), stop)
        num_keys = tl.minimum((p + end - token) // RATIO, capacity)  # that the last of these tokens sees
        num_keys = tl.where((request < num_requests) & (num_keys > TOPK), num_keys, 0)
        for tile in range(tl.program_id(1), tl.cdiv(num_keys, BLOCK_N), tl.num_programs(1)):
            w = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            block = tl.load(table_ptr + request.to(tl.int64) * stride_r + w // N, mask=w < num_keys, other=-1)
            here = (block >= 0) & (block < num_blocks)
            block_ptrs = cache_ptr + block.to(tl.int64) * stride_n
            at, scales_at = offsets_in_block(w % N, stride_b, N, LAYOUT, ROW_BYTES, SCALE_BYTES)
            k = load_rows(
                block_ptrs + at, block_ptrs + scales_at, here, dtype, D, BLOCK_D, LAYOUT, QUANT, NATIVE, ALIGNED
            )  # fmt: skip
            q_t = q_ptr + token.to(tl.int64) * stride_qt
            weights_t = weights_ptr + token.to(tl.int64) * stride_wt
            scores_t = scores_ptr + (token - first_token).to(tl.int64) * capacity
            for _ in range(token, end):
                score = tl.zeros((BLOCK_N,), tl.float32)
                for first in tl.static_range(0, H, BLOCK_H):
                    head = first + tl.arange(0, BLOCK_H)
                    q = load_columns(q_t + head.to(tl.int64) * stride_qh, head < H, 0, D, BLOCK_D)
                    weight = tl.load(weights_t + head * stride_wh, mask=head < H, other=0).to(tl.float32)
                    s = product(k, tl.trans(q), tl.zeros((BLOCK_N, BLOCK_H), tl.float32)) * scale
                    score += tl.sum(tl.where(s < 0, 0.0, s) * weight[None, :], 1)
                tl.store(scores_t + w, score, mask=w < num_keys)
                q_t += stride_qt
                weights_t += stride_wt
                scores_t += capacity
        token = end


@triton.jit
def sortable(score):
    """Bits that sort as scores do; a NaN counts as -inf, and -0 as 0."""
    score = tl.where(score != score, float("-inf"), tl.where(score == 0, 0.0, score))
    bits = score.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit(do_not_specialize=SIZES)
def select_kernel(
    scores_ptr, lens_ptr, starts_ptr, out_ptr, first_token, num_requests, capacity, RATIO: tl.constexpr,
    TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, TOPK]: of one token."""
    token = first_token + tl.program_id(0)
    _, p = position_of(starts_ptr, lens_ptr, token, num_requests)
    num_keys = tl.minimum((p + 1) // RATIO, capacity)
    out_ptr += token.to(tl.int64) * TOPK
    if num_keys <= TOPK:
        for begin in range(0, TOPK, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            tl.store(out_ptr + i, tl.where(i < num_keys, i, -1), mask=i < TOPK)
        return
    scores_ptr += tl.program_id(0).to(tl.int64) * capacity
    digit = tl.arange(0, 256)
    prefix = tl.full((), 0, tl.uint32)
    left = tl.full((), TOPK, tl.int32)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros((256,), tl.int32)
        for begin in range(0, num_keys, BLOCK):
            w = begin + tl.arange(0, BLOCK)
            bits = sortable(tl.load(scores_ptr + w, mask=w < num_keys, other=0.0))
            like = w < num_keys
            if step > 0:
                like &= (bits >> (shift + 8)) == prefix
            counts += tl.histogram(((bits >> shift) & 0xFF).to(tl.int32), 256, mask=like)
        at_least = tl.cumsum(counts, 0, reverse=True)
        chosen = tl.max(tl.where(at_least >= left, digit, 0), 0)
        left -= tl.sum(tl.where(digit > chosen, counts, 0), 0)
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    done = tl.full((), 0, tl.int32)
    for begin in range(0, num_keys, BLOCK):
        w = begin + tl.arange(0, BLOCK)
        here = w < num_keys
        bits = sortable(tl.load(scores_ptr + w, mask=here, other=0.0))
        equal = (here & (bits == prefix)).to(tl.int32)
        take = (here & (bits > prefix)).to(tl.int32)
        take += tl.where(tl.cumsum(equal, 0) <= left, equal, 0)
        left = tl.maximum(left - tl.sum(equal, 0), 0)
        tl.store(out_ptr + done + tl.cumsum(take, 0) - take, w, mask=take > 0)
        done += tl.sum(take, 0)


def indexer_score_topk(
    q, weights, k_cache, k_table, seq_lens, query_start_loc, *, topk, ratio, scale, layout="plain"
):
    """See `indexer_score_topk_reference`."""
    check_operands(q, weights, k_cache, k_table, seq_lens, query_start_loc, topk, ratio)
    require(layout in LAYOUTS, f"layout {layout} is not one of {', '.join(LAYOUTS)}")
    num_tokens, num_heads, width = q.shape
    n = rows_per_block(k_cache, layout, width, 0)
    out = torch.empty((num_tokens, topk), dtype=torch.int32, device=q.device)
    if num_tokens == 0:
        return out
    capacity = max(1, k_table.shape[1] * n)
    rows = RowSizes.of(layout, width, 0, q.device)
    if layout != "plain":
        q = _requantised(q, rows)
    tile = min(MAX_TILE_TOKENS, triton.next_power_of_2(max(1, num_tokens // max(1, len(seq_lens)))))
    at_once = min(num_tokens, max(1, SCORE_BYTES // (4 * capacity)))
    scores = torch.empty((at_once, capacity), dtype=torch.float32, device=q.device)
    keys = TILE_KEYS if q.dtype.itemsize == 2 else TILE_KEYS // 2
    options = dict(
        RATIO=ratio, TOPK=topk, H=num_heads, BLOCK_H=min(TILE_HEADS, padded(num_heads)), D=width,
        BLOCK_D=padded(width), BLOCK_N=keys, BLOCK_Q=tile, N=n, **vars(rows), ALIGNED=is_aligned(k_cache),
    )  # fmt: skip
    options |= zip(("stride_n", "stride_b"), cache_strides(k_cache))
    for first in range(0, num_tokens, at_once):
        end = min(num_tokens, first + at_once)
        tiles = triton.cdiv(end - first, tile)
        programs = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(q.device), tiles)
        score_kernel[tiles, max(1, min(programs, triton.cdiv(capacity, keys)))](
            q, weights, k_cache, k_table, seq_lens, query_start_loc, scores, *q.stride()[:2], *weights.stride(),
            k_table.stride(0), first, end, len(seq_lens), len(k_cache), capacity, scale, **options, num_warps=4,
        )  # fmt: skip
        select_kernel[(end - first,)](
            scores, seq_lens, query_start_loc, out, first, len(seq_lens), capacity, RATIO=ratio, TOPK=topk,
            BLOCK=max(256, min(2048, triton.next_power_of_2(capacity))), num_warps=8,
        )  # fmt: skip
    return out


def _requantised(q: torch.Tensor, rows: RowSizes) -> torch.Tensor:
    """Queries quantised by the rule of the keys that they meet, as bfloat16, which holds the values exactly."""
    num_tokens, num_heads, width = q.shape
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    requantise_kernel[(triton.cdiv(num_tokens * num_heads, REQUANTISED_ROWS),)](
        q, out, *q.stride()[:2], num_tokens * num_heads, H=num_heads, D=width, BLOCK=padded(width),
        ROWS=REQUANTISED_ROWS, LAYOUT=rows.LAYOUT, QUANT=rows.QUANT, NATIVE=rows.NATIVE, num_warps=4,
    )  # fmt: skip
    return out
