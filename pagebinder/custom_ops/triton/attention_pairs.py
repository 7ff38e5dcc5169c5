"""Decode attention over codes that are read in pairs: few queries, of which each is a column of a product.

A row of codes is read as 16-bit pairs of channels, which the tensor cores' loads can transpose as codes alone cannot:
one instruction unpacks each of its halves right where a product wants its operand, and nothing goes through shared
memory twice. Queries are columns, of which a product takes 8, where it takes 16 rows:

    K row     | 0 1 | 2 3 | ...      scores [keys, queries]    = low(K) @ q[0, 2, ...] + high(K) @ q[1, 3, ...]
    V row     | 0 1 | 2 3 | ...      even, odd [DV/2, queries] = low(V).T @ weights, high(V).T @ weights

Operands are float16, which holds every code of each format. So that nothing leaves its range, a query is a power of
two times values of up to 2^15, and a weight up to 2^HEADROOM. `attention_tile` has the same over any rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.attention_tile import load_columns, visible
from pagebinder.custom_ops.triton.values import LOG2_E, decoded_by_bits, product, rounded, tanh

# Bits of the largest weight: those down to 2^-29 of it keep all their digits.
HEADROOM = tl.constexpr(15)
LEAST_EXPONENT = tl.constexpr(24)  # of a query's power of two, biased: no products with it become 0
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)

# Two pairs in a register -> the lower, or the upper code of each as float16 (see `values` for four codes).
HALF_OF_E4M3 = """{
.reg .b32 t;
.reg .b16 l, h;
prmt.b32 t, $1, 0, 0x3120;
mov.b32 {l, h}, t;
cvt.rn.f16x2.e4m3x2 $0, HALF;
}"""
LOW_E4M3 = tl.constexpr(HALF_OF_E4M3.replace("HALF", "l"))
HIGH_E4M3 = tl.constexpr(HALF_OF_E4M3.replace("HALF", "h"))
LOW_E5M2 = tl.constexpr("prmt.b32 $0, $1, 0, 0x2404;")
HIGH_E5M2 = tl.constexpr("and.b32 $0, $1, 0xFF00FF00;")
# int8: 1024 + 128 + the integer, less that.
LOW_INT8 = tl.constexpr("""{
.reg .b32 t, u;
mov.b32 u, 0x64806480;
lop3.b32 t, $1, 0x00FF00FF, u, 0x6A;
sub.rn.f16x2 $0, t, u;
}""")
HIGH_INT8 = tl.constexpr("""{
.reg .b32 t, u;
mov.b32 u, 0x64806480;
shr.b32 t, $1, 8;
lop3.b32 t, t, 0x00FF00FF, u, 0x6A;
sub.rn.f16x2 $0, t, u;
}""")


@triton.jit
def half(pairs, UPPER: tl.constexpr, CODES: tl.constexpr, NATIVE: tl.constexpr):
    """uint16 pairs -> values of their first codes, or their second ones, float16. NATIVE: see `values.decoded`."""
    if NATIVE:
        OF_E4M3: tl.constexpr = HIGH_E4M3 if UPPER else LOW_E4M3
        OF_E5M2: tl.constexpr = HIGH_E5M2 if UPPER else LOW_E5M2
        OF_INT8: tl.constexpr = HIGH_INT8 if UPPER else LOW_INT8
        OF_FP8: tl.constexpr = OF_E4M3 if CODES == "fp8_e4m3" else OF_E5M2
        PTX: tl.constexpr = OF_INT8 if CODES == "int8" else OF_FP8
        value = tl.inline_asm_elementwise(PTX, "=r,r", [pairs], tl.float16, is_pure=True, pack=2)
    else:
        code = pairs >> 8 if UPPER else pairs & 0xFF
        value = decoded_by_bits(code.to(tl.uint8), CODES, tl.float16)
    return value


@triton.jit
def load_query_columns(row_ptrs, is_row, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """(even channels [D/2, queries] float16, odd ones, the power of two [queries] by which they are too large)."""
    q = load_columns(row_ptrs, is_row, 0, D, D).to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 14, LEAST_EXPONENT)
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    q = rounded(q * factor[:, None], tl.float16)
    even, odd = tl.split(tl.reshape(q, (BLOCK_M, D // 2, 2)))
    return tl.trans(even), tl.trans(odd), power


@triton.jit
def rows_of_keys(
    j0, block, head_ptr, table_ptr, num_blocks, lo, hi, stride_n: tl.constexpr, stride_b: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """(base, [keys] bytes from there to each row, whether its block exists) of keys [j0, j0 + BLOCK_N); `block`: that
    of all, if it is one.

    Rows outside [lo, hi) are others inside: a mask by row would cost three instructions for each of its copies.
    """
    key = tl.arange(0, BLOCK_N)
    if lo != 0:
        key = tl.maximum(key, lo - j0)
    key = tl.minimum(key, hi - 1 - j0)
    if BLOCK_SIZE % BLOCK_N == 0:
        head_ptr += block.to(tl.int64) * stride_n + j0 % BLOCK_SIZE * stride_b
        # Unsigned: one instruction multiplies, widens and adds.
        offset = key.to(tl.uint32).to(tl.int64) * stride_b
    else:
        block = tl.load(table_ptr + (j0 + key) // BLOCK_SIZE)
        offset = block.to(tl.int64) * stride_n + (j0 + key) % BLOCK_SIZE * stride_b
    return head_ptr, offset, (block >= 0) & (block < num_blocks)


@triton.jit
def attend_pairs(
    q_ptrs, is_row, p, slope, bias_ptrs, behind, farthest, head_ptr, table_ptr, num_blocks, lo, hi, begin, scale,
    soft_cap, k_scale, stride_n: tl.constexpr, stride_b: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, CAUSAL: tl.constexpr, CODES: tl.constexpr, ROW_SCALES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """(acc [BLOCK_M, DV], m, l) of the running softmax over keys [begin, hi) that are not before lo.

    Args: as of `attention_tile.attend`; q_ptrs, is_row, p, slope, bias_ptrs: by query. D and DV are powers of two,
        rows and their scales lie at multiples of 4 bytes.
    """
    q_even, q_odd, power = load_query_columns(q_ptrs, is_row, D, BLOCK_M)
    FOLDED: tl.constexpr = soft_cap is None and slope is None and bias_ptrs is None
    pair_k, pair_v = tl.arange(0, D // 2), tl.arange(0, DV // 2)
    even = tl.zeros((DV // 2, BLOCK_M), tl.float32)
    odd = tl.zeros((DV // 2, BLOCK_M), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)  # summed up at the end
    factor = (
        power * (scale * LOG2_E) if FOLDED else tl.full((BLOCK_M,), 1.0, tl.float32)
    )  # of scores, to bits
    unit = SMALLEST_NORMAL  # the largest scale of V so far, by which sums are too small
    following = tl.load(table_ptr + begin // BLOCK_SIZE, mask=begin < hi, other=-1)
    for j0 in range(begin, hi, BLOCK_N):
        block = following  # asked for a tile earlier: its rows are asked for at once
        if BLOCK_SIZE % BLOCK_N == 0:
            following = tl.load(table_ptr + tl.minimum(j0 + BLOCK_N, hi - 1) // BLOCK_SIZE)
        base, offset, exists = rows_of_keys(
            j0, block, head_ptr, table_ptr, num_blocks, lo, hi, stride_n, stride_b, BLOCK_N, BLOCK_SIZE
        )
        by_row = exists if BLOCK_SIZE % BLOCK_N == 0 else exists[:, None]
        by_column = exists if BLOCK_SIZE % BLOCK_N == 0 else exists[None, :]
        # Channels first: then a row's address is one multiplication and addition, for K and V alike.
        pair_ptr = base.to(tl.pointer_type(tl.uint16))
        k = tl.load((pair_ptr + pair_k)[None, :] + (offset // 2)[:, None], mask=by_row, other=0)
        v = tl.load((pair_ptr + D // 2 + pair_v)[:, None] + (offset // 2)[None, :], mask=by_column, other=0)
        s = product(half(k, False, CODES, NATIVE), q_even, tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        s = product(half(k, True, CODES, NATIVE), q_odd, s)
        if ROW_SCALES:
            scale_ptrs = (base + D + DV).to(tl.pointer_type(tl.float32)) + offset // 4
            s *= tl.load(scale_ptrs, mask=exists, other=0.0)[:, None]
            v_row_scale = tl.load(scale_ptrs + 1, mask=exists, other=0.0)
        if k_scale is not None:
            s *= k_scale
        j = j0 + tl.arange(0, BLOCK_N)
        if not FOLDED:
            s = scores_in_bits(s * power[None, :], j, p, slope, bias_ptrs, behind, farthest, scale, soft_cap)
        here = (j < hi) & exists
        if lo != 0:
            here &= j >= lo
        s = tl.where(
            here[:, None] & visible(p[None, :], p[None, :], j[:, None], WINDOW, CHUNK, CAUSAL),
            s,
            float("-inf"),
        )
        # Of scores as the product made them: the largest less itself is 0 at any size, in bits it need not be.
        m_new = tl.maximum(m, tl.max(s, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2((s - shift[None, :]) * factor[None, :] + HEADROOM)
        keep = tl.exp2((m - shift) * factor)
        m = m_new
        l = l * keep[None, :] + weights
        if ROW_SCALES:
            larger = tl.maximum(unit, tl.max(v_row_scale, 0))
            units = 1.0 / larger
            keep *= unit * units
            weights *= (v_row_scale * units)[:, None]
            unit = larger
        weights = rounded(weights, tl.float16)
        even = product(half(v, False, CODES, NATIVE), weights, even * keep[None, :])
        odd = product(half(v, True, CODES, NATIVE), weights, odd * keep[None, :])
    acc = tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2)), (BLOCK_M, DV))
    m = tl.where(m == float("-inf"), m, m * factor - HEADROOM)
    return acc * unit if ROW_SCALES else acc, m, tl.sum(l, 0)


@triton.jit
def scores_in_bits(s, j, p, slope, bias_ptrs, behind, farthest, scale, soft_cap):
    """Scores [keys, queries] with what is done to them; see `attention_tile.attend`."""
    if soft_cap is not None:
        s = soft_cap * LOG2_E * tanh(s * (scale / soft_cap))
    else:
        s *= scale * LOG2_E
    distance = j[:, None] - p[None, :]
    if slope is not None:
        s += slope[None, :] * distance.to(tl.float32)
    if bias_ptrs is not None:
        column = tl.minimum(tl.maximum(distance + behind, 0), farthest)
        s += tl.load(bias_ptrs[None, :] + column).to(tl.float32) * LOG2_E
    return s
