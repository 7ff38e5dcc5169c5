"""`pagebinder_triton::compress_norm_rope_store`: windows of tokens become entries, and states move on.

    start_states_kernel   grid [R, slots * 3]                the states that requests start from, out of their blocks
    compress_kernel       grid [T // RATIO + 2 * R]          a window of a request: its entry, the states within it

Windows are independent but for the state that a step starts from, so a long prompt is as parallel as it has windows.
What a window's program adds, token by token and always in this order, so that cuts of a prompt change no bit:

    tokens       | window w - 1           | window w                  |
    slot 0       a a a a  (or the state's slot 1 and the rest)   then   b b b b   -> entry w, norm, RoPE, store
    slot 1                                  a a a a                   only where a state is kept that needs it

States are copied before any is written, since the block of the new state may be that of the old one. The reference's
checks of lengths and block ids are not made; what has no block is neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.compress.compress import check_compress
from pagebinder.custom_ops.compress.paged_compress import EMPTY
from pagebinder.custom_ops.latent.layouts import require, rows_per_block
from pagebinder.custom_ops.sparse.sparse_mla import check_lengths
from pagebinder.custom_ops.triton.latent_rows import RowSizes, cache_strides, is_aligned, store_row_tile
from pagebinder.custom_ops.triton.norm_rope import block_of, turned_trailing
from pagebinder.custom_ops.triton.values import SIZES

LEAST = tl.constexpr(EMPTY)
QUARTER_TURN = tl.constexpr(1.5707963267948966)


@triton.jit(do_not_specialize=SIZES)
def start_states_kernel(
    state_ptr, table_ptr, lens_ptr, starts_ptr, out_ptr, stride_n, stride_s, stride_p, stride_r, num_blocks, columns,
    block_size, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [R, slots, 3, D]: zeros for requests that begin or do not go on."""
    request, part = tl.program_id(0), tl.program_id(1)
    num_new = tl.load(starts_ptr + request + 1) - tl.load(starts_ptr + request)
    context = tl.load(lens_ptr + request) - num_new
    index = (context - 1) // block_size
    goes_on = (context > 0) & (num_new > 0) & (index < columns)
    block = tl.load(table_ptr + request.to(tl.int64) * stride_r + index, mask=goes_on, other=0)
    goes_on &= (block > 0) & (block < num_blocks)
    column = tl.arange(0, BLOCK)
    from_ptr = state_ptr + block.to(tl.int64) * stride_n + part // 3 * stride_s + part % 3 * stride_p
    x = tl.load(from_ptr + column, mask=goes_on & (column < D), other=0)
    row = request.to(tl.int64) * tl.num_programs(1) + part
    tl.store(out_ptr + row * D + column, x, mask=column < D)


@triton.jit
def request_of_window(starts_ptr, tile, num_requests, RATIO: tl.constexpr):
    """The last r in [0, num_requests) whose first window is not after `tile`; two more than its tokens fill."""
    first, last = 0, num_requests - 1
    while first < last:
        middle = (first + last + 1) // 2
        if tl.load(starts_ptr + middle) // RATIO + 2 * middle <= tile:
            first = middle
        else:
            last = middle - 1
    return first


@triton.jit
def load_state(ptr, column, mask, D: tl.constexpr):
    """(largest z, sum of weights, weighted sum) of a slot."""
    most = tl.load(ptr + column, mask=mask, other=0)
    total = tl.load(ptr + D + column, mask=mask, other=0)
    return most, total, tl.load(ptr + 2 * D + column, mask=mask, other=0)


@triton.jit
def add_token(most, total, weighted, kv_ptr, gate_ptr, bias_ptr, column, mask):
    """A token's channels join a running softmax."""
    kv = tl.load(kv_ptr + column, mask=mask, other=0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=mask, other=0).to(tl.float32)
    z = tl.load(gate_ptr + column, mask=mask, other=0).to(tl.float32) + bias
    most = tl.where(total > 0, most, LEAST)
    higher = tl.maximum(most, z)
    kept, weight = tl.exp(most - higher), tl.exp(z - higher)
    return higher, total * kept + weight, weighted * kept + weight * kv


@triton.jit
def store_state(ptr, most, total, weighted, column, mask, stride_p):
    tl.store(ptr + column, tl.where(total > 0, most, 0.0), mask=mask)
    tl.store(ptr + stride_p + column, total, mask=mask)
    tl.store(ptr + 2 * stride_p + column, weighted, mask=mask)


@triton.jit
def angle_tables(position, freq_ptr, rope_scale, pair, is_pair):
    """(cos, sin) of position * frequency, rounded to float32: the angle's quarter turn, found in float64, and series.

    The library's functions would keep a table in local memory for large angles.
    """
    angle = (position.to(tl.float32) * tl.load(freq_ptr + pair, mask=is_pair, other=0)).to(tl.float64)
    quarter = tl.floor(angle / QUARTER_TURN + 0.5)
    x = (angle - quarter * QUARTER_TURN).to(tl.float32)  # within pi / 4 of 0
    x2 = x * x
    sin = x + x * x2 * (-1.6666654611e-1 + x2 * (8.3321608736e-3 + x2 * -1.9515295891e-4))
    cos = 1 - 0.5 * x2 + x2 * x2 * (4.1666645683e-2 + x2 * (-1.3887316255e-3 + x2 * 2.4433157118e-5))
    quarter = quarter.to(tl.int32)
    is_odd = quarter % 2 != 0
    turned_cos, turned_sin = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    turned_cos = tl.where((quarter + 1) & 2 != 0, -turned_cos, turned_cos)
    turned_sin = tl.where(quarter & 2 != 0, -turned_sin, turned_sin)
    return turned_cos * rope_scale, turned_sin * rope_scale


@triton.jit(do_not_specialize=SIZES)
def compress_kernel(
    kv_ptr, gate_ptr, bias_ptr, norm_ptr, freq_ptr, start_ptr, state_ptr, state_table_ptr, entry_ptr, entry_table_ptr,
    lens_ptr, starts_ptr, stride_kv, stride_gate, stride_sn, stride_ss, stride_sp, stride_sr, stride_er, num_requests,
    num_states, state_columns, num_pages, entry_columns, block_size, eps, rope_scale, stride_n: tl.constexpr,
    stride_b: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, D: tl.constexpr,
    PAIRS: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr, NOPE: tl.constexpr,
    QUANT: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, NATIVE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = 2 if OVERLAP else 1
    WIDE: tl.constexpr = SLOTS * D
    OWN: tl.constexpr = WIDE - D  # where b halves begin
    REST: tl.constexpr = D - 2 * PAIRS
    request = request_of_window(starts_ptr, tl.program_id(0), num_requests, RATIO)
    first = tl.load(starts_ptr + request)
    seq_len = tl.load(lens_ptr + request)
    context = seq_len - (tl.load(starts_ptr + request + 1) - first)
    index = tl.program_id(0) - first // RATIO - 2 * request
    w = context // RATIO + index
    begin = tl.maximum(w * RATIO, context)
    end = tl.minimum((w + 1) * RATIO, seq_len)
    if (begin >= end) | (context < 0):
        return
    column = tl.arange(0, BLOCK) - REST % 2
    mask = (column >= 0) & (column < D)
    # the rows of position 0, were it among the new tokens
    kv_ptr += (first - context).to(tl.int64) * stride_kv
    gate_ptr += (first - context).to(tl.int64) * stride_gate
    start_ptr += request.to(tl.int64) * (3 * WIDE)
    slot_0 = start_ptr + tl.where(index == 0, 0, 3 * D)
    m_0, l_0, s_0 = load_state(slot_0, column, mask & (index < SLOTS), D)
    if OVERLAP:
        before = tl.where(index == 0, begin, tl.maximum((w - 1) * RATIO, context))
        kv_t, gate_t = kv_ptr + before.to(tl.int64) * stride_kv, gate_ptr + before.to(tl.int64) * stride_gate
        for t in tl.range(before, w * RATIO, loop_unroll_factor=4):
            m_0, l_0, s_0 = add_token(m_0, l_0, s_0, kv_t, gate_t, bias_ptr + t % RATIO * WIDE, column, mask)
            kv_t += stride_kv
            gate_t += stride_gate
    keeps = (end == seq_len) | (end // block_size > begin // block_size)
    next_mask = mask & keeps
    m_1, l_1, s_1 = load_state(start_ptr + 3 * OWN, column, next_mask & (index == 0), D)
    state_table_ptr += request.to(tl.int64) * stride_sr
    kv_ptr += begin.to(tl.int64) * stride_kv
    gate_ptr += begin.to(tl.int64) * stride_gate
    p = begin
    while p < end:
        stop = tl.minimum((p // block_size + 1) * block_size, end)
        for t in tl.range(p, stop, loop_unroll_factor=4):
            bias_t = bias_ptr + t % RATIO * WIDE
            m_0, l_0, s_0 = add_token(m_0, l_0, s_0, kv_ptr + OWN, gate_ptr + OWN, bias_t + OWN, column, mask)
            if OVERLAP:
                m_1, l_1, s_1 = add_token(m_1, l_1, s_1, kv_ptr, gate_ptr, bias_t, column, next_mask)
            kv_ptr += stride_kv
            gate_ptr += stride_gate
        if (stop % block_size == 0) | (stop == seq_len):
            place = (stop - 1) // block_size
            block = tl.load(state_table_ptr + place, mask=place < state_columns, other=0)
            keep = mask & (block > 0) & (block < num_states)
            to_ptr = state_ptr + block.to(tl.int64) * stride_sn
            closes = stop == (w + 1) * RATIO
            if OVERLAP:
                m, l, s = tl.where(closes, m_1, m_0), tl.where(closes, l_1, l_0), tl.where(closes, s_1, s_0)
                store_state(to_ptr, m, l, s, column, keep, stride_sp)
                l, s = tl.where(closes, 0.0, l_1), tl.where(closes, 0.0, s_1)
                store_state(to_ptr + stride_ss, m_1, l, s, column, keep, stride_sp)
            else:
                l, s = tl.where(closes, 0.0, l_0), tl.where(closes, 0.0, s_0)
                store_state(to_ptr, m_0, l, s, column, keep, stride_sp)
        p = stop
    if end < (w + 1) * RATIO:
        return
    row = tl.arange(0, 1)
    page = tl.load(
        entry_table_ptr + request.to(tl.int64) * stride_er + w // N + row, mask=w // N + row < entry_columns, other=0
    )  # fmt: skip
    raw = tl.where(mask, s_0 / l_0, 0.0)
    if NORMED:
        weight = tl.load(norm_ptr + column, mask=mask, other=0).to(tl.float32)
        raw = raw * tl.rsqrt(tl.sum(raw * raw, 0) / D + eps) * weight
    y = raw[None, :]
    if PAIRS > 0:
        pair = tl.arange(0, BLOCK // 2)[None, :] - (REST + 1) // 2
        is_pair = (pair >= 0) & (pair < PAIRS)
        cos, sin = angle_tables(w * RATIO, freq_ptr, rope_scale, pair, is_pair)
        y = turned_trailing(y, cos, sin, is_pair)
    store_row_tile(
        y, column[None, :], entry_ptr + page.to(tl.int64) * stride_n, w % N + row, (page > 0) & (page < num_pages),
        stride_b, N, D, BLOCK, LAYOUT, NOPE, QUANT, ROW_BYTES, SCALE_BYTES, NATIVE, ALIGNED,
    )  # fmt: skip


def compress_norm_rope_store(
    kv, gate, position_bias, norm_weight, inv_freq, state_cache, state_table, entry_cache, entry_table, seq_lens,
    query_start_loc, *, ratio, overlap, eps, rope_scale, block_size, layout="plain", rope_dim=0,
) -> None:  # fmt: skip
    """See `compress_norm_rope_store_reference`."""
    width = check_compress(kv, gate, position_bias, norm_weight, inv_freq, ratio, overlap)
    slots, num_requests = 2 if overlap else 1, len(seq_lens)
    fits = state_cache.shape[1:] == (slots, 3, width) and state_cache.dtype == torch.float32
    require(fits and state_cache.stride(3) == 1, "state_cache is [N, c, 3, d] float32, its last stride 1")
    check_lengths(seq_lens, query_start_loc)
    for name, table in (("state_table", state_table), ("entry_table", entry_table)):
        require(table.dtype == torch.int32 and table.dim() == 2, f"{name} must be int32 [R, M]")
        require(len(table) >= num_requests, f"{name} must have at least as many rows as requests")
    require(block_size > 0, "block_size must be positive")
    n = rows_per_block(entry_cache, layout, width, rope_dim)
    if num_requests == 0 or len(kv) == 0:
        return
    kv, gate = (x if x.stride(1) == 1 else x.contiguous() for x in (kv, gate))
    norm = position_bias if norm_weight is None else norm_weight  # unread where there is none
    weights = [x.contiguous() for x in (position_bias, norm, inv_freq)]
    block, _ = block_of(width, len(inv_freq))
    starts = torch.empty((num_requests, slots, 3, width), dtype=torch.float32, device=kv.device)
    start_states_kernel[num_requests, 3 * slots](
        state_cache, state_table, seq_lens, query_start_loc, starts, *state_cache.stride()[:3], state_table.stride(0),
        len(state_cache), state_table.shape[1], block_size, D=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    options = dict(zip(("stride_n", "stride_b"), cache_strides(entry_cache)))
    compress_kernel[(len(kv) // ratio + 2 * num_requests,)](
        kv, gate, *weights, starts, state_cache, state_table, entry_cache, entry_table, seq_lens, query_start_loc,
        kv.stride(0), gate.stride(0), *state_cache.stride()[:3], state_table.stride(0), entry_table.stride(0),
        num_requests, len(state_cache), state_table.shape[1], len(entry_cache), entry_table.shape[1], block_size, eps,
        rope_scale, **options, N=n, RATIO=ratio, OVERLAP=overlap, D=width, PAIRS=len(inv_freq),
        NORMED=norm_weight is not None, BLOCK=block, **vars(RowSizes.of(layout, width, rope_dim, kv.device)),
        ALIGNED=is_aligned(entry_cache), num_warps=min(4, max(1, block // 128)), enable_fp_fusion=False,
    )  # fmt: skip
