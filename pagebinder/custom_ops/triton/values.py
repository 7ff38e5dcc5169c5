"""Device functions on values: rounding, products of tiles, tanh, and the one-byte codes of quantised K and V.

Triton's interpreter truncates float32 to bfloat16 and multiplies the bits of bfloat16 tiles, so kernels round and
multiply through `rounded` and `product`, which on a GPU are the plain instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Operands of kernels that change from step to step. A kernel made for a 1, or for multiples of 16, would be compiled
# again in the middle of serving, so kernels that take one say do_not_specialize=SIZES.
SIZES = (
    "num_tokens", "num_requests", "num_rows", "num_slots", "num_seen", "first_token", "end_token", "row_tokens",
    "row_tiles", "size_b", "size_c", "columns", "state_columns", "entry_columns", "capacity", "window_capacity",
    "entry_capacity", "num_blocks", "window_blocks", "entry_blocks", "num_pages", "num_states", "split_up_to",
    "channels_of_split", "parts",
    # of block tables, whose width is that of a step's longest request
    "stride_r", "stride_sr", "stride_er", "window_stride_r", "entry_stride_r",
)  # fmt: skip


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x (float32) in `dtype`, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        y = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def through(x, dtype: tl.constexpr):
    """x (float32) after a trip through `dtype`: where the reference keeps an intermediate in it."""
    return rounded(x, dtype).to(tl.float32)


@triton.jit
def product(a, b, acc):
    """a @ b + acc in float32: tensor cores for 16-bit operands, exact products for float32."""
    if INTERPRETED:
        y = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        y = tl.dot(a, b, acc, input_precision="ieee")
    return y


@triton.jit
def tanh(x):
    """By its series near 0, where the difference of exponentials has no digits left; relative error about 1e-6."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    e = tl.exp(-2 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.2, near, far)


@triton.jit
def decoded(codes, CODES: tl.constexpr, dtype: tl.constexpr):
    """uint8 codes -> their values in `dtype`, without the scale; exact in each float type, on every GPU.

    The bits of e5m2 are the upper half of a float16; those of e4m3, moved, are one that is 2^8 too small.
    """
    if CODES == "int8":
        value = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif CODES == "fp8_e5m2":
        value = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.uint16)
        small = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        value = small.to(tl.float32) * 256.0
    return rounded(value, dtype)


@triton.jit
def nearest_integer(x):
    """To nearest even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encoded(x, CODES: tl.constexpr, LARGEST: tl.constexpr):
    """Values that are divided by their scale -> uint8 codes: nearest even, saturating; a NaN becomes the largest."""
    x = tl.where(x != x, LARGEST, tl.minimum(tl.maximum(x, -LARGEST), LARGEST))
    if CODES == "int8":
        code = nearest_integer(x).to(tl.int32) & 0xFF
    else:
        MANTISSA: tl.constexpr = 3 if CODES == "fp8_e4m3" else 2
        LOWEST: tl.constexpr = -6 if CODES == "fp8_e4m3" else -14
        bits = x.to(tl.uint32, bitcast=True)
        exponent = tl.maximum(((bits >> 23) & 0xFF).to(tl.int32) - 127, LOWEST)
        steps_per_unit = ((MANTISSA - exponent + 127) << 23).to(tl.float32, bitcast=True)
        steps = nearest_integer(tl.abs(x) * steps_per_unit).to(tl.int32)
        # A subnormal has no leading step, a value rounded up to the next power of two one too many: both carry.
        code = ((exponent - LOWEST) << MANTISSA) + steps
        code |= ((bits >> 31) << 7).to(tl.int32)
    return code.to(tl.uint8)
