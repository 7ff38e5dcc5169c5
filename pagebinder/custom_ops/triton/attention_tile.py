"""Device functions of paged attention: which keys a tile of queries sees, and its softmax over a range of them.

A tile is BLOCK_M rows: row i is query token i // HEADS of the tile and head i % HEADS of those that share a KV head,
so that K and V are read once for all of them. A width D is cut in two (96 = 64 + 32, 576 = 512 + 64): channels
[0, CUT) lie in D_A columns and [CUT, D) in D_B, both powers of two; the columns that are left over are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.values import LOG2_E, decoded, product, rounded, tanh


@triton.jit
def key_range(p_first, p_last, seq_len, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr):
    """[begin, end): the keys that any query from position p_first to p_last can see."""
    begin = 0
    end = seq_len
    if CAUSAL:
        end = tl.minimum(end, p_last + 1)
    if WINDOW > 0:
        begin = tl.maximum(begin, p_first - WINDOW + 1)
        if not CAUSAL:
            end = tl.minimum(end, p_last + WINDOW)
    if CHUNK > 0:
        begin = tl.maximum(begin, p_first // CHUNK * CHUNK)
        end = tl.minimum(end, (tl.maximum(p_last, 0) // CHUNK + 1) * CHUNK)
    return begin, tl.maximum(end, begin)


@triton.jit
def visible(p, reach, j, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr):
    """[queries, keys] for positions p [queries, 1] and j [1, keys]; a negative p is in no chunk of a key. reach: the
    last key that a causal query sees, p itself unless it sees on."""
    see = j >= 0
    if CAUSAL:
        see &= j <= reach
    if WINDOW > 0:
        see &= j > p - WINDOW
        if not CAUSAL:
            see &= j < p + WINDOW
    if CHUNK > 0:
        see &= (p >= 0) & (j // CHUNK == p // CHUNK)
    return see


@triton.jit
def load_columns(row_ptrs, row_mask, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Columns [FIRST, END) of rows in BLOCK columns, zeros beyond END or where row_mask is False."""
    column = FIRST + tl.arange(0, BLOCK)
    mask = row_mask[:, None]
    if FIRST + BLOCK > END:
        mask &= column[None, :] < END
    return tl.load(row_ptrs[:, None] + column[None, :], mask=mask, other=0)


@triton.jit
def load_row_scales(scale_ptrs, mask, ALIGNED: tl.constexpr):
    """The float32 at each byte pointer, 0 where the mask is False."""
    if ALIGNED:
        scale = tl.load(scale_ptrs.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    else:
        byte = tl.arange(0, 4)
        parts = tl.load(scale_ptrs[:, None] + byte[None, :], mask=mask[:, None], other=0).to(tl.uint32)
        scale = (
            tl.sum(parts << (8 * byte[None, :]).to(tl.uint32), axis=1)
            .to(tl.uint32)
            .to(tl.float32, bitcast=True)
        )
    return scale


@triton.jit
def attend(
    q_a, q_b, p, ahead, slope, bias_ptrs, behind, farthest, acc, m, l, cache, kv_head, head_ptr, table_ptr,
    num_blocks, lo, hi, begin, end, scale, soft_cap, k_scale, stride_n: tl.constexpr, stride_b: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr, CUT: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
    CODES: tl.constexpr, ROW_SCALES: tl.constexpr, ALIGNED: tl.constexpr, NATIVE: tl.constexpr, V_IS_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys [begin, end), cut to [lo, hi), to the running softmax (acc, m, l); scores are in bits (log2).

    Args:
        ahead: per row, keys behind its own that a causal query sees; None: none. begin: a multiple of BLOCK_N.
            MASKED: False promises that every query sees all these keys.
        cache: its descriptor, by which whole tiles of rows in one block are copied; None: by addresses of rows.
        head_ptr: the KV head in block 0. slope: per row, in bits; None without ALiBi. soft_cap: None without.
        bias_ptrs: per row, the bias of its head by distance; None without. behind, farthest: its columns of distance
            0 and of the farthest keys ahead.
        scale: positive. k_scale: fixed scale of the codes of K, or None. ROW_SCALES: those of K and of V lie behind
            each row.
        V_IS_K: the value row is the first DV = CUT channels of the key row.
    """
    # Codes are decoded in place where that spills no registers.
    dtype: tl.constexpr = q_a.dtype
    # Scores stay as the product made them; `factor`, which is positive, turns them into bits.
    FOLDED: tl.constexpr = soft_cap is None and slope is None and bias_ptrs is None
    for j0 in range(begin, end, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        here = (j >= lo) & (j < hi)
        if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies in one block
            block = tl.load(table_ptr + j0 // BLOCK_SIZE)
            here &= (block >= 0) & (block < num_blocks)
            row_ptrs = head_ptr + block.to(tl.int64) * stride_n
            row_ptrs = row_ptrs + (j0 % BLOCK_SIZE + tl.arange(0, BLOCK_N)).to(tl.int64) * stride_b
        else:
            block = tl.load(table_ptr + j // BLOCK_SIZE, mask=here, other=-1)
            here &= (block >= 0) & (block < num_blocks)
            row_ptrs = head_ptr + block.to(tl.int64) * stride_n + (j % BLOCK_SIZE).to(tl.int64) * stride_b
        if cache is not None:
            k_a = cache.load([block, kv_head, j0 % BLOCK_SIZE, 0]).reshape(BLOCK_N, D_A)
        else:
            k_a = load_columns(row_ptrs, here, 0, CUT, D_A)
        k_a_values = k_a if CODES == "" else decoded(k_a, CODES, dtype, NATIVE, D_A <= 128)
        s = product(q_a, tl.trans(k_a_values), tl.zeros((q_a.shape[0], BLOCK_N), tl.float32))
        if D_B > 0:
            k_b = load_columns(row_ptrs, here, CUT, D, D_B)
            if CODES != "":
                k_b = decoded(k_b, CODES, dtype, NATIVE, D_A <= 128)
            s = product(q_b, tl.trans(k_b), s)
        if V_IS_K:
            v = k_a_values
        elif cache is not None:
            v = cache.load([block, kv_head, j0 % BLOCK_SIZE, D]).reshape(BLOCK_N, BLOCK_DV)
        else:
            v = load_columns(row_ptrs + D, here, 0, DV, BLOCK_DV)
            if CODES != "":
                v = decoded(v, CODES, dtype, NATIVE, BLOCK_DV <= 512)
        if ROW_SCALES:
            s *= load_row_scales(row_ptrs + D + DV, here, ALIGNED)[None, :]
            v_row_scale = load_row_scales(row_ptrs + D + DV + 4, here, ALIGNED)
        if k_scale is not None:
            s *= k_scale
        factor = scale * LOG2_E
        if not FOLDED:
            if soft_cap is not None:
                s = soft_cap * LOG2_E * tanh(s * (scale / soft_cap))
            else:
                s *= factor
            factor = 1.0
        if slope is not None:
            s += slope[:, None] * (j[None, :] - p[:, None]).to(tl.float32)
        if bias_ptrs is not None:
            column = tl.minimum(tl.maximum(j[None, :] - p[:, None] + behind, 0), farthest)
            s += tl.load(bias_ptrs[:, None] + column).to(tl.float32) * LOG2_E
        if MASKED:
            reach = p if ahead is None else p + ahead
            see = here[None, :] & visible(p[:, None], reach[:, None], j[None, :], WINDOW, CHUNK, CAUSAL)
            s = tl.where(see, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(s * factor - shift[:, None])  # one instruction for both, and the exponential
        keep = tl.exp2(m - shift)
        m = m_new
        l = l * keep + tl.sum(weights, 1)
        acc *= keep[:, None]
        if (
            ROW_SCALES
        ):  # relative to the tile's largest scale, so that no weight leaves the range of a 16-bit type
            largest = tl.maximum(tl.max(v_row_scale, 0), 1.1754943508222875e-38)
            weights *= v_row_scale[None, :] / largest
            part = product(rounded(weights, dtype), v, tl.zeros((q_a.shape[0], BLOCK_DV), tl.float32))
            acc += part * largest
        else:
            acc = product(rounded(weights, dtype), v, acc)
    return acc, m, l
