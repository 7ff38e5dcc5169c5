"""Rows of latent caches on the device: loaded, decoded, encoded and stored, for every layout of `latent/layouts.py`.

    plain      block `stride_n` apart, row `stride_b` apart, elements of a float type
    of bytes   page of N rows: row e at e * ROW_BYTES, its scales at N * ROW_BYTES + e * SCALE_BYTES

    a row of bytes     | QUANT codes | QUANT codes | ... NOPE | (fp8_v32: a float32 scale each) | bf16 .. D |
    a tile of it       [rows, BLOCK] channels, whatever bytes they lie in; of attention's rows see `stored_rows`

What is stored has the bytes of the reference; what is loaded has its values. Scales that are powers of two come from
bits. Caches that begin at odd addresses are read and written byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.latent.layouts import row_layout
from pagebinder.custom_ops.latent.small_floats import FP4_AMAX_FLOOR, FP8_AMAX_FLOOR
from pagebinder.custom_ops.triton.attention_tile import load_columns
from pagebinder.custom_ops.triton.e4m3 import E4M3_MAX, MIN_SCALE, e4m3_codes, e4m3_values
from pagebinder.custom_ops.triton.gpu import has_fp8
from pagebinder.custom_ops.triton.values import e2m1_values, rounded, through

FP8_FLOOR = tl.constexpr(FP8_AMAX_FLOOR)
FP4_FLOOR = tl.constexpr(FP4_AMAX_FLOOR)


@dataclass(frozen=True)
class RowSizes:
    """What kernels are told of the rows of a layout: channels in codes, channels of a scale, bytes; see `e4m3`."""

    LAYOUT: str
    NOPE: int
    QUANT: int
    ROW_BYTES: int
    SCALE_BYTES: int
    NATIVE: bool

    @classmethod
    def of(cls, layout: str, width: int, rope_dim: int, device: torch.device) -> RowSizes:
        if layout == "plain":
            return cls(layout, width, 1, 0, 0, False)
        spec = row_layout(layout, width, rope_dim)
        quant = triton.next_power_of_2(width) if layout == "fp8_index" else spec.block
        return cls(layout, spec.nope, quant, spec.row_bytes, spec.scale_bytes, has_fp8(device))


def cache_strides(cache: torch.Tensor) -> tuple[int, int]:
    """(stride_n, stride_b); of bytes only the first counts."""
    return cache.stride(0), cache.stride(1) if cache.dim() == 3 else 0


def is_aligned(*caches: torch.Tensor | None) -> bool:
    """Whether scales and bfloat16 of rows of bytes can be read as such."""
    of_bytes = [c for c in caches if c is not None and c.dtype == torch.uint8]
    return all(n % 4 == 0 for c in of_bytes for n in (c.data_ptr(), c.stride(0)))


# ---- numbers -------------------------------------------------------------------------------------------------------


@triton.jit
def power_of_two(exponent):
    """2^e as float32 for -127 < e < 128."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def from_ue8m0(scale_byte):
    """UE8M0 bytes -> float32; 0 is 2^-127 and 255 NaN."""
    byte = scale_byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_exponent(amax, FLOOR: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr):
    """ceil(log2(max(amax, FLOOR) / ((1 + MANTISSA / 2^23) * 2^TOP))), exactly; of a NaN, that of its bits."""
    bits = tl.where(amax != amax, amax, tl.maximum(amax, FLOOR)).to(tl.int32, bitcast=True)
    above = (bits & 0x7FFFFF) > MANTISSA
    return ((bits >> 23) & 0xFF) - 127 - TOP + above.to(tl.int32)


@triton.jit
def largest_of(blocks):
    """Magnitudes of blocks [..., QUANT]: their maximum, NaN if there is one."""
    has_nan = tl.max((blocks != blocks).to(tl.int32), axis=2) > 0
    largest = tl.max(tl.where(blocks != blocks, 0.0, tl.abs(blocks)), axis=2)
    return tl.where(has_nan, float("nan"), largest)


@triton.jit
def e2m1_codes(x):
    """Nearest, ties to even, saturating at 6; the sign is bit 3."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size > 1.25).to(tl.int32) + (size > 2.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size >= 3.5).to(tl.int32)
    return code | ((x.to(tl.uint32, bitcast=True) >> 31) << 3).to(tl.int32)


@triton.jit
def scaled_codes(blocks, LAYOUT: tl.constexpr, NATIVE: tl.constexpr):
    """blocks [rows, groups, QUANT] float32 -> (codes, exponents or, of fp8_v32, scales [rows, groups])."""
    amax = largest_of(blocks)
    if LAYOUT == "fp8_v32":
        scale = tl.div_rn(amax, tl.zeros_like(amax) + E4M3_MAX)
        scale = tl.where(scale != scale, scale, tl.maximum(scale, MIN_SCALE))
        codes = e4m3_codes(tl.div_rn(blocks, tl.zeros_like(blocks) + scale[:, :, None]), NATIVE)
    elif LAYOUT == "fp4_index":
        exponent = scale_exponent(amax, FP4_FLOOR, 0x400000, 2)
        scale = tl.where(amax != amax, 128, exponent)  # 128: a scale of NaN
        codes = e2m1_codes(blocks * power_of_two(tl.where(amax != amax, 0, -exponent))[:, :, None])
    else:
        scale = scale_exponent(amax, FP8_FLOOR, 0x600000, 8)
        codes = e4m3_codes(blocks * power_of_two(-scale)[:, :, None], NATIVE)
    return codes, scale


@triton.jit
def code_values(codes, NATIVE: tl.constexpr):
    """e4m3 codes -> float32; by way of float16 where the GPU converts to that."""
    if NATIVE:
        x = e4m3_values(codes, tl.float16, NATIVE, True).to(tl.float32)
    else:
        x = e4m3_values(codes, tl.float32, NATIVE, True)
    return x


@triton.jit
def through_e4m3(blocks, NATIVE: tl.constexpr):
    """blocks [rows, groups, QUANT] after a trip through e4m3 with a power-of-two scale for each."""
    codes, exponent = scaled_codes(blocks, "fp8_v4", NATIVE)
    return code_values(codes, NATIVE) * power_of_two(exponent)[:, :, None]


# ---- bytes ---------------------------------------------------------------------------------------------------------


@triton.jit
def load_wide(ptrs, at, mask, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """bfloat16 or float32 number `at` [1, columns] behind pointers to bytes [rows, 1], 0 where the mask is False."""
    if ALIGNED:
        x = tl.load(ptrs.to(tl.pointer_type(dtype)) + at, mask=mask, other=0)
    elif dtype == tl.bfloat16:
        ptrs += 2 * at
        low = tl.load(ptrs, mask=mask, other=0).to(tl.uint16)
        high = tl.load(ptrs + 1, mask=mask, other=0).to(tl.uint16)
        x = (low | (high << 8)).to(tl.bfloat16, bitcast=True)
    else:
        ptrs += 4 * at
        bits = tl.load(ptrs, mask=mask, other=0).to(tl.uint32)
        for i in tl.static_range(1, 4):
            bits |= tl.load(ptrs + i, mask=mask, other=0).to(tl.uint32) << (8 * i)
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def store_wide(ptrs, at, x, mask, ALIGNED: tl.constexpr):
    """The reverse of `load_wide`."""
    if ALIGNED:
        tl.store(ptrs.to(tl.pointer_type(x.dtype)) + at, x, mask=mask)
    elif x.dtype == tl.bfloat16:
        ptrs += 2 * at
        bits = x.to(tl.uint16, bitcast=True)
        tl.store(ptrs, (bits & 0xFF).to(tl.uint8), mask=mask)
        tl.store(ptrs + 1, (bits >> 8).to(tl.uint8), mask=mask)
    else:
        ptrs += 4 * at
        bits = x.to(tl.uint32, bitcast=True)
        for i in tl.static_range(4):
            tl.store(ptrs + i, ((bits >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)


# ---- rows ----------------------------------------------------------------------------------------------------------


@triton.jit
def offsets_in_block(
    entry, stride_b: tl.constexpr, N: tl.constexpr, LAYOUT: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):  # fmt: skip
    """Where the rows and the scales of entries begin in a block, in its elements."""
    if LAYOUT == "plain":
        at = entry.to(tl.int64) * stride_b
        scales_at = at
    else:
        at = entry * ROW_BYTES
        scales_at = N * ROW_BYTES + entry * SCALE_BYTES
    return at, scales_at


@triton.jit
def load_rows(
    row_ptrs, scale_ptrs, here, dtype: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
    QUANT: tl.constexpr, NATIVE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows, plain or of an index, as [rows, BLOCK] of `dtype`, zeros where there are none; decoded to bfloat16."""
    if LAYOUT == "plain":
        values = load_columns(row_ptrs, here, 0, D, BLOCK)
    else:
        x = load_codes(row_ptrs, scale_ptrs, here, D, BLOCK, LAYOUT, QUANT, NATIVE, ALIGNED)
        values = rounded(x, tl.bfloat16) if dtype == tl.bfloat16 else rounded(through(x, tl.bfloat16), dtype)
    return values


@triton.jit
def load_codes(
    row_ptrs, scale_ptrs, here, D: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr, QUANT: tl.constexpr,
    NATIVE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows of codes, float32."""
    ROWS: tl.constexpr = row_ptrs.shape[0]
    GROUPS: tl.constexpr = BLOCK // QUANT
    if LAYOUT == "fp4_index":
        pair = load_columns(row_ptrs, here, 0, D // 2, BLOCK // 2).to(tl.int32)
        x = tl.reshape(tl.join(e2m1_values(pair & 15), e2m1_values(pair >> 4)), (ROWS, BLOCK))
    else:
        x = code_values(load_columns(row_ptrs, here, 0, D, BLOCK), NATIVE)
    group = tl.arange(0, GROUPS)[None, :]
    mask = here[:, None] & (group * QUANT < D)
    if LAYOUT == "fp8_index":
        scale = load_wide(scale_ptrs[:, None], group, mask, tl.float32, ALIGNED)
    else:
        scale = from_ue8m0(tl.load(scale_ptrs[:, None] + group, mask=mask, other=127))
    if GROUPS == 1:
        y = x * scale
    else:
        y = tl.reshape(tl.reshape(x, (ROWS, GROUPS, QUANT)) * scale[:, :, None], (ROWS, BLOCK))
    return y


@triton.jit
def store_row_tile(
    x, column, page_ptrs, entry, keep, stride_b: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr, NOPE: tl.constexpr, QUANT: tl.constexpr, ROW_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, NATIVE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Stores x [rows, BLOCK] float32, whose columns are `column` [1, BLOCK] (from 0 on if the layout has codes)."""
    keep = keep[:, None]
    at, scales_at = offsets_in_block(entry, stride_b, N, LAYOUT, ROW_BYTES, SCALE_BYTES)
    row_ptrs, scale_ptrs = (page_ptrs + at)[:, None], (page_ptrs + scales_at)[:, None]
    if LAYOUT == "plain":
        mask = keep & (column >= 0) & (column < D)
        tl.store(row_ptrs + column, rounded(x, page_ptrs.dtype.element_ty), mask=mask)
    else:
        ROWS: tl.constexpr = page_ptrs.shape[0]
        GROUPS: tl.constexpr = BLOCK // QUANT
        x = through(x, tl.bfloat16)
        blocks = tl.reshape(tl.where(column < NOPE, x, 0.0), (ROWS, GROUPS, QUANT))
        codes, scale = scaled_codes(blocks, LAYOUT, NATIVE)
        group = tl.arange(0, GROUPS)[None, :]
        has_scale = keep & (group * QUANT < NOPE)
        if LAYOUT == "fp4_index":
            low, high = tl.split(tl.reshape(codes, (ROWS, BLOCK // 2, 2)))
            pair = tl.arange(0, BLOCK // 2)[None, :]
            tl.store(row_ptrs + pair, (low | (high << 4)).to(tl.uint8), mask=keep & (pair < NOPE // 2))
        else:
            tl.store(row_ptrs + column, tl.reshape(codes, (ROWS, BLOCK)), mask=keep & (column < NOPE))
        if LAYOUT == "fp8_v32":
            store_wide(row_ptrs + NOPE, group, scale, has_scale, ALIGNED)
        elif LAYOUT == "fp8_index":
            store_wide(scale_ptrs, group, power_of_two(scale), has_scale, ALIGNED)
        else:
            tl.store(scale_ptrs + group, (scale + 127).to(tl.uint8), mask=has_scale)
        if LAYOUT == "fp8_v4":  # scales are filled up with zeros
            byte = NOPE // QUANT + tl.arange(0, 8)[None, :]
            tl.store(scale_ptrs + byte, (byte * 0).to(tl.uint8), mask=keep & (byte < SCALE_BYTES))
        if D > NOPE:
            ptrs, mask = row_ptrs + ROW_BYTES - 2 * (D - NOPE), keep & (column >= NOPE) & (column < D)
            store_wide(ptrs, column - NOPE, rounded(x, tl.bfloat16), mask, ALIGNED)
