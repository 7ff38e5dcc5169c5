"""Device functions on e4m3 codes: values of activations to codes and scales, and codes to the operands of products.

NATIVE: the GPU has the type (compute capability 8.9). Without, and in the interpreter, bits are moved instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.values import encoded, rounded

E4M3_MAX = tl.constexpr(448.0)
MIN_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def e4m3_codes(x, NATIVE: tl.constexpr):
    """float32 -> uint8 codes: nearest even, saturating; a NaN stays one."""
    if NATIVE:
        x = tl.where(x > E4M3_MAX, E4M3_MAX, tl.where(x < -E4M3_MAX, -E4M3_MAX, x))
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = tl.where(x != x, tl.full(x.shape, 0x7F, tl.uint8), encoded(x, "fp8_e4m3", E4M3_MAX, NATIVE))
    return code


@triton.jit
def e4m3_values(codes, dtype: tl.constexpr, NATIVE: tl.constexpr, HAS_NAN: tl.constexpr):
    """uint8 codes -> their values in `dtype`, exactly, subnormal ones as well, and NaN if there may be any."""
    if NATIVE and dtype == tl.float16:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # The bits of a code, moved to those of a float32, are one that is 2^120 too small.
        wide = codes.to(tl.uint32)
        small = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True)
        wide_value = small * 1.329227995784916e36
        if HAS_NAN:
            wide_value = tl.where((wide & 0x7F) == 0x7F, float("nan"), wide_value)
        value = rounded(wide_value, dtype)
    return value


@triton.jit
def magnitude_bits(x):
    """The bits of |x| (float32) as int32: in the order of magnitudes, and those of a NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest_bits):
    """Bits of the largest magnitude -> the scale with which it becomes the largest code."""
    largest = largest_bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, E4M3_MAX, tl.float32))
    return tl.where(scale < MIN_SCALE, MIN_SCALE, scale)
