"""Kernels of paged attention: tiles of queries over all their keys, or few queries over parts of them, merged.

    tile_kernel     grid [tiles, KV heads]          prefill: a tile of one request walks over its whole context
    split_kernel    grid [splits, KV heads, R]      decode: a request's context in parts, each with its own softmax;
                                                    few parts are merged by the program that is the last to end
    merge_kernel    grid [R + 1, H]                 the parts of a token become one softmax

Grids follow from capacities; how much there is to do is read from query_start_loc and seq_lens, and a program that
has nothing to do leaves at once. The tiles of request r begin at number query_start_loc[r] // BLOCK_Q + r, which
leaves room for the last, partly empty tile of every request, so the request of a tile is found by bisection:

    query_start_loc  0         9   11                  BLOCK_Q = 4
    tiles            0  1  2    | 3  | 4 ...           request 1: 9 // 4 + 1 = 3, padding: 11 // 4 + 2 = 4

Padding tokens count as one more request that sees no key. Strides of the cache are constants of a kernel: of other
integers the compiler only knows whether they are multiples of 16, and would load rows of 264 bytes byte by byte. See
`attention_tile` for rows, widths and options; PAIRS, for decodes over most codes: `attention_pairs` in its place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.attention_pairs import attend_pairs
from pagebinder.custom_ops.triton.attention_tile import attend, key_range, load_columns
from pagebinder.custom_ops.triton.values import LN_2, LOG2_E, SIZES, rounded


@triton.jit
def request_of_tile(starts_ptr, tile, num_requests, BLOCK_Q: tl.constexpr):
    """The last r in [0, num_requests] whose first tile is not after `tile`."""
    first, last = 0, num_requests
    while first < last:
        middle = (first + last + 1) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= tile:
            first = middle
        else:
            last = middle - 1
    return first


@triton.jit
def load_queries(
    q_ptr,
    stride_qt,
    stride_qh,
    token,
    head,
    is_row,
    D: tl.constexpr,
    CUT: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
):
    """(q_a [BLOCK_M, D_A], q_b [BLOCK_M, D_B] or q_a again if there is no second part)."""
    row_ptrs = q_ptr + token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    q_a = load_columns(row_ptrs, is_row, 0, CUT, D_A)
    q_b = q_a
    if D_B > 0:
        q_b = load_columns(row_ptrs, is_row, CUT, D, D_B)
    return q_a, q_b


@triton.jit
def rows_of_tile(
    pid_head, HEADS: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """(KV head, query token in the tile, query head, whether its head exists) of the rows of a program."""
    row = tl.arange(0, BLOCK_M)
    kv_head = pid_head // CHUNKS
    head_in_group = (pid_head % CHUNKS) * HEADS + row % HEADS
    return kv_head, row // HEADS, kv_head * GROUP + head_in_group, head_in_group < GROUP


@triton.jit
def cut_keys(lo, hi, begins_ptr, request, is_padding, context, CONTEXT_ONLY: tl.constexpr):
    """[lo, hi) without the keys that other parts of unified attention read."""
    if begins_ptr is not None:
        lo = tl.maximum(lo, tl.load(begins_ptr + request, mask=not is_padding, other=0))
    if CONTEXT_ONLY:
        hi = tl.minimum(hi, context)
    return lo, tl.maximum(hi, lo)


@triton.jit(do_not_specialize=SIZES)
def tile_kernel(
    q_ptr, cache_ptr, cache, table_ptr, lens_ptr, starts_ptr, begins_ptr, ahead_ptr, sinks_ptr, slopes_ptr, bias_ptr,
    scales_ptr, out_ptr, lse_ptr, stride_qt, stride_qh, stride_r, stride_bias, stride_sink, num_tokens, num_requests,
    num_blocks, capacity, split_up_to, scale, soft_cap, behind, farthest,
    stride_n: tl.constexpr, stride_g: tl.constexpr, stride_b: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, CUT: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
    CODES: tl.constexpr, ROW_SCALES: tl.constexpr, ALIGNED: tl.constexpr, NATIVE: tl.constexpr,
    V_IS_K: tl.constexpr, CONTEXT_ONLY: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Requests of more than split_up_to new tokens, and padding; the others are left to `split_kernel`.

    cache: a descriptor, or None; see `attention_tile.attend`.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # long tiles first
    request = request_of_tile(starts_ptr, tile, num_requests, BLOCK_Q)
    is_padding = request == num_requests
    first = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1, mask=not is_padding, other=num_tokens)
    start = first + (tile - first // BLOCK_Q - request) * BLOCK_Q
    if start >= end:
        return
    if (end - first <= split_up_to) & (not is_padding):
        return
    seq_len = tl.minimum(tl.load(lens_ptr + request, mask=not is_padding, other=0), capacity)
    kv_head, token, head, is_row = rows_of_tile(tl.program_id(1), HEADS, CHUNKS, GROUP, BLOCK_M)
    is_row &= (token < BLOCK_Q) & (start + token < end)
    token += start
    p = seq_len - end + token
    if not PAIRS:
        q_a, q_b = load_queries(q_ptr, stride_qt, stride_qh, token, head, is_row, D, CUT, D_A, D_B)
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head, mask=is_row, other=0.0) * LOG2_E
    bias_ptrs = None if bias_ptr is None else bias_ptr + tl.where(is_row, head, 0) * (farthest + 1)
    bias_ptrs = bias_ptrs if stride_bias is None else of_queries(bias_ptrs, stride_bias, token, is_row)
    k_scale = None if scales_ptr is None else tl.load(scales_ptr + kv_head)
    v_scale = None if scales_ptr is None else tl.load(scales_ptr + tl.num_programs(1) // CHUNKS + kv_head)
    head_ptr = cache_ptr + kv_head.to(tl.int64) * stride_g
    table_ptr += request.to(tl.int64) * stride_r
    p_first = seq_len - end + start
    p_last = seq_len - end + tl.minimum(start + BLOCK_Q, end) - 1
    ahead = None if ahead_ptr is None else tl.load(ahead_ptr + token, mask=is_row, other=0)
    if ahead_ptr is not None:
        p_last = tl.max(tl.where(is_row, p + ahead, 0), 0)
    lo, hi = key_range(p_first, p_last, seq_len, WINDOW, CHUNK, CAUSAL)
    lo, hi = cut_keys(lo, hi, begins_ptr, request, is_padding, seq_len - end + first, CONTEXT_ONLY)
    begin = lo // BLOCK_N * BLOCK_N
    if PAIRS:
        q_ptrs = q_ptr + token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
        acc, m, l = attend_pairs(
            q_ptrs, is_row, p, slope, bias_ptrs, behind, farthest, head_ptr, table_ptr, num_blocks, lo, hi, begin,
            scale, soft_cap, k_scale, stride_n, stride_b, D, DV, BLOCK_M, BLOCK_N, BLOCK_SIZE, WINDOW, CHUNK, CAUSAL,
            CODES, ROW_SCALES, NATIVE,
        )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)
        # All keys before the first query's are seen by every query.
        if WINDOW == 0 and CHUNK == 0 and begins_ptr is None:
            whole = hi if not CAUSAL else tl.maximum(tl.minimum(p_first + 1, hi), 0)
            whole = whole // BLOCK_N * BLOCK_N
            acc, m, l = attend(
                q_a, q_b, p, ahead, slope, bias_ptrs, behind, farthest, acc, m, l, cache, kv_head, head_ptr,
                table_ptr, num_blocks, lo, hi, begin, whole, scale, soft_cap, k_scale, stride_n, stride_b, D, DV, CUT,
                D_A, D_B, BLOCK_DV, BLOCK_N, BLOCK_SIZE, WINDOW, CHUNK, CAUSAL, CODES, ROW_SCALES, ALIGNED, NATIVE,
                V_IS_K, False,
            )  # fmt: skip
            begin = whole
        acc, m, l = attend(
            q_a, q_b, p, ahead, slope, bias_ptrs, behind, farthest, acc, m, l, None, kv_head, head_ptr, table_ptr,
            num_blocks, lo, hi, begin, hi, scale, soft_cap, k_scale, stride_n, stride_b, D, DV, CUT, D_A, D_B,
            BLOCK_DV, BLOCK_N, BLOCK_SIZE, WINDOW, CHUNK, CAUSAL, CODES, ROW_SCALES, ALIGNED, NATIVE, V_IS_K, True,
        )  # fmt: skip
    if v_scale is not None:
        acc *= v_scale
    sinks_ptr = sinks_ptr if stride_sink is None else of_queries(sinks_ptr, stride_sink, token, is_row)
    total, weight = with_sink(l, m, sinks_ptr, head, is_row)
    acc *= (weight / nonzero(total))[:, None]
    store_rows(
        out_ptr,
        lse_ptr,
        acc,
        m + tl.log2(nonzero(l)),
        token,
        head,
        is_row,
        num_tokens,
        GROUP,
        CHUNKS,
        DV,
        BLOCK_DV,
    )


@triton.jit
def of_queries(ptrs, stride, token, is_row):
    """What belongs to each row's token, of what does not belong to all; stride: from token to token.

    Triton 3.6 has no functions that return None, so where there is nothing, or all share it, callers do not ask.
    """
    return ptrs + tl.where(is_row, token, 0).to(tl.int64) * stride


@triton.jit
def with_sink(l, m, sinks_ptr, head, is_row):
    """(sum of weights with the sink, factor of those without it), per row; 0 weights where no key is seen."""
    if sinks_ptr is None:
        weight = tl.full(m.shape, 1.0, tl.float32)
        total = l
    else:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=float("-inf")) * LOG2_E
        top = tl.maximum(m, sink)
        shift = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(m - shift)
        total = l * weight + tl.exp2(sink - shift)
    return total, weight


@triton.jit
def nonzero(l):
    """A divisor: rows that see no key have sums of 0, and get zeros and an LSE of -inf."""
    return tl.where(l == 0, 1.0, l)


@triton.jit
def store_rows(
    out_ptr, lse_ptr, out, lse, token, head, is_row, num_tokens, GROUP: tl.constexpr, CHUNKS: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """out [T, H, DV] and, if wanted, lse [H, T] from bits to nats."""
    num_heads = tl.num_programs(1) // CHUNKS * GROUP
    column = tl.arange(0, BLOCK_DV)
    row_ptrs = out_ptr + (token.to(tl.int64) * num_heads + head)[:, None] * DV
    mask = is_row[:, None] & (column[None, :] < DV)
    tl.store(row_ptrs + column[None, :], rounded(out, out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + head.to(tl.int64) * num_tokens + token, lse * LN_2, mask=is_row)


@triton.jit(do_not_specialize=SIZES)
def split_kernel(
    q_ptr, cache_ptr, table_ptr, lens_ptr, starts_ptr, begins_ptr, ahead_ptr, slopes_ptr, bias_ptr, scales_ptr,
    part_ptr, part_lse_ptr, arrivals_ptr, sinks_ptr, out_ptr, lse_ptr, stride_qt, stride_qh, stride_r, stride_bias,
    stride_sink, num_tokens, num_blocks, capacity, split_up_to, row_tokens, scale, soft_cap, behind, farthest,
    stride_n: tl.constexpr, stride_g: tl.constexpr, stride_b: tl.constexpr,
    SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, CUT: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, CAUSAL: tl.constexpr, CODES: tl.constexpr, ROW_SCALES: tl.constexpr,
    ALIGNED: tl.constexpr, NATIVE: tl.constexpr, V_IS_K: tl.constexpr, CONTEXT_ONLY: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Part `split` of the keys of requests of up to split_up_to new tokens: normalised rows and their LSE in bits.

    part [rows, H, SPLITS, DV], part_lse [rows, H, SPLITS] float32. The row of a request's token i is
    request * row_tokens + i, or the token itself if row_tokens is 0. Parts without keys only get an LSE of -inf.

    arrivals [R, KV heads * CHUNKS] int32, zeros before and after: the program that is last to count there merges the
    parts of its request and heads, AT_ONCE at a time, and padding gets zeros; None: parts are left to merge_kernel.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    split, request = tl.program_id(0), tl.program_id(2)
    first = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1)
    if end - first > split_up_to:
        return
    seq_len = tl.minimum(tl.load(lens_ptr + request), capacity)
    kv_head, row_token, head, has_head = rows_of_tile(tl.program_id(1), HEADS, CHUNKS, GROUP, BLOCK_M)
    num_heads = tl.num_programs(1) // CHUNKS * GROUP
    slope = None if slopes_ptr is None else tl.load(slopes_ptr + head, mask=has_head, other=0.0) * LOG2_E
    bias_of_heads = None if bias_ptr is None else bias_ptr + tl.where(has_head, head, 0) * (farthest + 1)
    k_scale = None if scales_ptr is None else tl.load(scales_ptr + kv_head)
    v_scale = None if scales_ptr is None else tl.load(scales_ptr + tl.num_programs(1) // CHUNKS + kv_head)
    head_ptr = cache_ptr + kv_head.to(tl.int64) * stride_g
    table_ptr += request.to(tl.int64) * stride_r
    for start in range(first, end, BLOCK_Q):
        is_row = has_head & (row_token < BLOCK_Q) & (start + row_token < end)
        token = start + row_token
        p = seq_len - end + token
        bias_ptrs = (
            bias_of_heads if stride_bias is None else of_queries(bias_of_heads, stride_bias, token, is_row)
        )
        p_last = seq_len - end + tl.minimum(start + BLOCK_Q, end) - 1
        ahead = None if ahead_ptr is None else tl.load(ahead_ptr + token, mask=is_row, other=0)
        if ahead_ptr is not None:
            p_last = tl.max(tl.where(is_row, p + ahead, 0), 0)
        lo, hi = key_range(seq_len - end + start, p_last, seq_len, WINDOW, CHUNK, CAUSAL)
        lo, hi = cut_keys(lo, hi, begins_ptr, request, False, seq_len - end + first, CONTEXT_ONLY)
        begin = lo // BLOCK_N * BLOCK_N
        keys = tl.maximum(tl.cdiv(tl.cdiv(hi - begin, BLOCK_N), SPLITS) * BLOCK_N, MIN_KEYS)
        begin += split * keys
        hi = tl.minimum(hi, begin + keys)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)
        row = token if row_tokens == 0 else request * row_tokens + token - first
        part_row = (row.to(tl.int64) * num_heads + head) * SPLITS + split
        if begin < hi:
            if PAIRS:
                q_ptrs = q_ptr + token.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
                acc, m, l = attend_pairs(
                    q_ptrs, is_row, p, slope, bias_ptrs, behind, farthest, head_ptr, table_ptr, num_blocks, lo, hi,
                    begin, scale, soft_cap, k_scale, stride_n, stride_b, D, DV, BLOCK_M, BLOCK_N, BLOCK_SIZE, WINDOW,
                    CHUNK, CAUSAL, CODES, ROW_SCALES, NATIVE,
                )  # fmt: skip
            else:
                q_a, q_b = load_queries(q_ptr, stride_qt, stride_qh, token, head, is_row, D, CUT, D_A, D_B)
                acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
                acc, m, l = attend(
                    q_a, q_b, p, ahead, slope, bias_ptrs, behind, farthest, acc, m, l, None, kv_head, head_ptr,
                    table_ptr, num_blocks, lo, hi, begin, hi, scale, soft_cap, k_scale, stride_n, stride_b, D, DV,
                    CUT, D_A, D_B, BLOCK_DV, BLOCK_N, BLOCK_SIZE, WINDOW, CHUNK, CAUSAL, CODES, ROW_SCALES, ALIGNED,
                    NATIVE, V_IS_K, True,
                )  # fmt: skip
            if v_scale is not None:
                acc *= v_scale
            column = tl.arange(0, BLOCK_DV)
            acc /= nonzero(l)[:, None]
            mask = is_row[:, None] & (column[None, :] < DV)
            tl.store(part_ptr + part_row[:, None] * DV + column[None, :], acc, mask=mask)
        tl.store(part_lse_ptr + part_row, m + tl.log2(nonzero(l)), mask=is_row)
    if arrivals_ptr is not None:
        merge_what_all_left(
            part_ptr, part_lse_ptr, arrivals_ptr, sinks_ptr, out_ptr, lse_ptr, stride_sink, num_tokens, first, end,
            GROUP, HEADS, CHUNKS, ROWS, SPLITS, BLOCK_SPLITS, AT_ONCE, DV, BLOCK_DV,
        )  # fmt: skip


@triton.jit
def merge_what_all_left(
    part_ptr, part_lse_ptr, arrivals_ptr, sinks_ptr, out_ptr, lse_ptr, stride_sink, num_tokens, first, end,
    GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The end of `split_kernel`, where rows of parts are tokens; see there for arrivals."""
    request, pid_head = tl.program_id(2), tl.program_id(1)
    num_heads = tl.num_programs(1) // CHUNKS * GROUP
    _, row_token, head, is_row = rows_of_tile(pid_head, HEADS, CHUNKS, GROUP, ROWS)
    is_row &= row_token == 0
    tl.debug_barrier()  # what this program's threads have stored is there before it counts
    arrival_ptr = arrivals_ptr + request * tl.num_programs(1) + pid_head
    if tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(arrival_ptr, 0)
        is_last = request == tl.num_programs(2) - 1  # padding is behind it
        for i in range(tl.where(is_last, num_tokens, end) - first):
            token = first + i
            part_row = (token.to(tl.int64) * num_heads + head) * SPLITS
            store_merged(
                part_ptr, part_lse_ptr, sinks_ptr, out_ptr, lse_ptr, stride_sink, num_tokens, num_heads, token, head,
                part_row, is_row & (token < end), is_row, SPLITS, BLOCK_SPLITS, AT_ONCE, DV, BLOCK_DV,
            )  # fmt: skip


@triton.jit
def store_merged(
    part_ptr, part_lse_ptr, sinks_ptr, out_ptr, lse_ptr, stride_sink, num_tokens, num_heads, token, head, part_row,
    exists, is_row, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The parts of some heads of a token as one softmax, with the sink; zeros for heads whose parts do not exist.

    part_row [rows] int64: the first part of each. AT_ONCE parts are read at once: what is read one behind the other
    is waited for one behind the other.
    """
    column, every = tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_SPLITS)[None, :]
    lse_ptrs = part_lse_ptr + part_row[:, None]
    lses = tl.load(lse_ptrs + every, mask=exists[:, None] & (every < SPLITS), other=float("-inf"))
    m = tl.max(lses, 1)
    base = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2(lses - base[:, None]), 1)
    acc = tl.zeros((head.shape[0], BLOCK_DV), tl.float32)
    for s0 in range(0, SPLITS, AT_ONCE):
        split = s0 + tl.arange(0, AT_ONCE)[None, :]
        part_lse = tl.load(lse_ptrs + split, mask=exists[:, None] & (split < SPLITS), other=float("-inf"))
        ptrs = part_ptr + (part_row[:, None] + split)[:, :, None] * DV + column[None, None, :]
        written = (part_lse != float("-inf"))[:, :, None] & (column < DV)[None, None, :]
        part = tl.load(ptrs, mask=written, other=0.0)
        acc += tl.sum(part * tl.exp2(part_lse - base[:, None])[:, :, None], 1)
    lse = m + tl.log2(nonzero(l))
    sinks_ptr = sinks_ptr if stride_sink is None else of_queries(sinks_ptr, stride_sink, token, is_row)
    total, weight = with_sink(l, m, sinks_ptr, head, is_row)
    acc *= (weight / nonzero(total))[:, None]
    out_row = out_ptr + (token.to(tl.int64) * num_heads + head)[:, None] * DV
    mask = is_row[:, None] & (column < DV)[None, :]
    tl.store(out_row + column[None, :], rounded(acc, out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + head.to(tl.int64) * num_tokens + token, lse * LN_2, mask=is_row)


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    part_ptr, part_lse_ptr, starts_ptr, sinks_ptr, out_ptr, lse_ptr, stride_sink, num_tokens, num_requests,
    split_up_to, row_tokens, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """The parts of each token and head as one softmax, with the sink; PADDING: writes padding tokens, too.

    Programs of the third dimension of the grid take a request's tokens in turns.
    """
    request, num_heads = tl.program_id(0), tl.num_programs(1)
    is_padding = request == num_requests
    if is_padding & (not PADDING):
        return
    first = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1, mask=not is_padding, other=num_tokens)
    if (end - first > split_up_to) & (not is_padding):
        return
    head = tl.program_id(1) + tl.arange(0, 1)
    is_row = head >= 0
    for i in range(tl.program_id(2), end - first, tl.num_programs(2)):
        token = first + i
        row = token if row_tokens == 0 else request * row_tokens + i
        part_row = (row.to(tl.int64) * num_heads + head) * SPLITS
        store_merged(
            part_ptr, part_lse_ptr, sinks_ptr, out_ptr, lse_ptr, stride_sink, num_tokens, num_heads, token, head,
            part_row, is_row & (not is_padding), is_row, SPLITS, BLOCK_SPLITS, AT_ONCE, DV, BLOCK_DV,
        )  # fmt: skip
