"""Kernels of attention in parts: keys that requests share, for all their queries at once; the merge of parts.

    shared_kernel   grid [splits, KV heads, tiles]    a tile is BLOCK_Q neighbours in `shared_tokens`
    merge_states_kernel   grid [T, H]                 one softmax of P parts, with the sink

    shared_tokens   5 9 12 | 3 4 | -1 -1 ...      a tile may hold the end of a group of sharers and the next ones:
    tile            0           1                 it walks over the keys of each, with the rows of the others masked

See `attention_kernels` for what grids follow from, and `attention_tile` for rows, widths and options.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.attention_kernels import load_queries, nonzero, rows_of_tile
from pagebinder.custom_ops.triton.attention_tile import attend, key_range
from pagebinder.custom_ops.triton.values import LOG2_E, SIZES, rounded


@triton.jit
def requests_of(starts_ptr, token, num_requests, BISECTIONS: tl.constexpr):
    """For each token the last request that begins at or before it."""
    first = tl.zeros(token.shape, tl.int32)
    last = first + num_requests - 1
    for _ in range(BISECTIONS):
        middle = (first + last + 1) // 2
        begins = tl.load(starts_ptr + middle) <= token
        first = tl.where(begins, middle, first)
        last = tl.where(begins, last, tl.maximum(middle - 1, first))
    return first


@triton.jit(do_not_specialize=SIZES)
def shared_kernel(
    q_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr, shared_lens_ptr, leaders_ptr, tokens_ptr, slopes_ptr, part_ptr,
    part_lse_ptr, stride_qt, stride_qh, stride_r, num_tokens, num_requests, num_blocks, capacity, scale, soft_cap,
    stride_n: tl.constexpr, stride_g: tl.constexpr, stride_b: tl.constexpr, SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr, BISECTIONS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CUT: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Part `split` of the shared keys: part [T, H, SPLITS, DV] normalised, part_lse [T, H, SPLITS] in bits.

    Only rows of sharers are written; the LSEs of the others must be -inf before.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    NOBODY: tl.constexpr = 2147483647
    split = tl.program_id(0)
    kv_head, row_token, head, has_head = rows_of_tile(tl.program_id(1), HEADS, CHUNKS, GROUP, BLOCK_M)
    entry = tl.program_id(2) * BLOCK_Q + row_token
    is_row = has_head & (row_token < BLOCK_Q) & (entry < num_tokens)
    token = tl.load(tokens_ptr + entry, mask=is_row, other=-1)
    is_row &= (token >= 0) & (token < num_tokens)
    if tl.max(is_row.to(tl.int32), 0) == 0:
        return
    token = tl.where(is_row, token, 0)
    request = requests_of(starts_ptr, token, num_requests, BISECTIONS)
    p = tl.load(lens_ptr + request) - tl.load(starts_ptr + request + 1) + token
    shared = tl.minimum(tl.load(shared_lens_ptr + request), capacity)
    leader = tl.load(leaders_ptr + request)
    is_row &= (leader >= 0) & (leader < num_requests)
    leader = tl.where(is_row, leader, NOBODY)
    num_heads = tl.num_programs(1) // CHUNKS * GROUP
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head, mask=has_head, other=0.0) * LOG2_E
    head_ptr = cache_ptr + kv_head.to(tl.int64) * stride_g
    q_a, q_b = load_queries(q_ptr, stride_qt, stride_qh, token, head, is_row, D, CUT, D_A, D_B)
    part_row = (token.to(tl.int64) * num_heads + head) * SPLITS + split
    column = tl.arange(0, BLOCK_DV)
    of = tl.min(leader, 0)
    while of < num_requests:
        mine = leader == of
        end = tl.max(tl.where(mine, shared, 0), 0)
        first = tl.min(tl.where(mine, p, NOBODY), 0)
        lo, hi = key_range(first, tl.max(tl.where(mine, p, 0), 0), end, WINDOW, 0, True)
        begin = lo // BLOCK_N * BLOCK_N
        keys = tl.maximum(tl.cdiv(tl.cdiv(hi - begin, BLOCK_N), SPLITS) * BLOCK_N, MIN_KEYS)
        begin += split * keys
        hi = tl.minimum(hi, begin + keys)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)
        if begin < hi:
            acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
            acc, m, l = attend(
                q_a, q_b, p, None, slope, None, 0, 0, acc, m, l, None, 0, head_ptr,
                table_ptr + of.to(tl.int64) * stride_r, num_blocks, lo, hi, begin, hi, scale, soft_cap, None,
                stride_n, stride_b, D, DV, CUT, D_A, D_B, BLOCK_DV, BLOCK_N, BLOCK_SIZE, WINDOW, 0, True, "", False,
                False, False, False, True,
            )  # fmt: skip
            acc /= nonzero(l)[:, None]
            mask = mine[:, None] & (column[None, :] < DV)
            tl.store(part_ptr + part_row[:, None] * DV + column[None, :], acc, mask=mask)
        tl.store(part_lse_ptr + part_row, m + tl.log2(nonzero(l)), mask=mine)
        leader = tl.where(mine, NOBODY, leader)
        of = tl.min(leader, 0)


@triton.jit(do_not_specialize=SIZES)
def merge_states_kernel(
    outs_ptr, lses_ptr, sinks_ptr, out_ptr, lse_ptr, num_tokens, PARTS: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """outs [PARTS, T, H, DV], lses [PARTS, H, T] float32 -> out [T, H, DV] and, if wanted, lse [H, T]."""
    token, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, BLOCK_DV)
    at = head.to(tl.int64) * num_tokens + token
    row = (token.to(tl.int64) * num_heads + head) * DV
    m = -float("inf")
    l = 0.0
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    for part in range(PARTS):
        lse = tl.load(lses_ptr + part * num_heads.to(tl.int64) * num_tokens + at)
        lse = tl.where(lse == float("inf"), -float("inf"), lse) * LOG2_E
        top = tl.where(lse > m, lse, m)
        shift = tl.where(top == -float("inf"), 0.0, top)
        keep, weight = tl.exp2(m - shift), tl.exp2(lse - shift)
        values = tl.load(
            outs_ptr + part * num_heads.to(tl.int64) * num_tokens * DV + row + column,
            mask=column < DV,
            other=0.0,
        ).to(tl.float32)
        acc = acc * keep + tl.where(lse == -float("inf"), 0.0, values) * weight
        l = l * keep + weight
        m = top
    if lse_ptr is not None:
        tl.store(lse_ptr + at, (m + tl.log2(nonzero(l))) / LOG2_E)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * LOG2_E
        top = tl.where(sink > m, sink, m)
        shift = tl.where(top == -float("inf"), 0.0, top)
        acc *= tl.exp2(m - shift)
        l = l * tl.exp2(m - shift) + tl.exp2(sink - shift)
    tl.store(out_ptr + row + column, rounded(acc / nonzero(l), out_ptr.dtype.element_ty), mask=column < DV)
