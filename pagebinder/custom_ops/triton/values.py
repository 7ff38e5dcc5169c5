"""Device functions on values: rounding, products of tiles, tanh, and the one-byte codes of quantised K and V.

Triton's interpreter truncates float32 to bfloat16 and multiplies the bits of bfloat16 tiles, so kernels round and
multiply through `rounded` and `product`, which on a GPU are the plain instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.interpreter import keep_masks_boolean

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
if triton.knobs.runtime.interpret:
    keep_masks_boolean()
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


# Four codes in a register -> four 16-bit values in two, in PTX; (l, h): lower and upper bytes of the values.
# e4m3: the bits, moved to those of a bfloat16, are one that is 2^120 too small; products are exact, subnormals too.
E4M3_TO_BF16 = tl.constexpr("""{
.reg .b32 l, h, s, z;
shr.b32 h, $2, 4;
and.b32 h, h, 0x07070707;
and.b32 s, $2, 0x80808080;
or.b32 h, h, s;
shl.b32 l, $2, 4;
and.b32 l, l, 0xF0F0F0F0;
prmt.b32 s, l, h, 0x5140;
prmt.b32 h, l, h, 0x7362;
mov.b32 l, s;
mov.b32 s, 0x7B807B80;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 $0, l, s, z;
fma.rn.bf16x2 $1, h, s, z;
}""")
E4M3_TO_F16 = tl.constexpr("""{
.reg .b16 l, h;
mov.b32 {l, h}, $2;
cvt.rn.f16x2.e4m3x2 $0, l;
cvt.rn.f16x2.e4m3x2 $1, h;
}""")
E5M2_TO_BF16 = tl.constexpr("""{
.reg .b32 l, h;
.reg .b16 a, b, c, d;
.reg .f32 e, f, g, i;
prmt.b32 l, $2, 0, 0x1404;
prmt.b32 h, $2, 0, 0x3424;
mov.b32 {a, b}, l;
mov.b32 {c, d}, h;
cvt.f32.f16 e, a;
cvt.f32.f16 f, b;
cvt.f32.f16 g, c;
cvt.f32.f16 i, d;
cvt.rn.bf16x2.f32 $0, f, e;
cvt.rn.bf16x2.f32 $1, i, g;
}""")
E5M2_TO_F16 = tl.constexpr("""{
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
}""")
# int8: (128 + its low 7 bits) - (128, or 256 where it is negative).
INT8_TO_BF16 = tl.constexpr("""{
.reg .b32 l, h, a, b, m;
prmt.b32 l, $2, 0x43434343, 0x4140;
prmt.b32 h, $2, 0x43434343, 0x4342;
and.b32 a, l, 0xFF7FFF7F;
and.b32 l, l, 0xFF80FF80;
and.b32 b, h, 0xFF7FFF7F;
and.b32 h, h, 0xFF80FF80;
mov.b32 m, 0xBF80BF80;
fma.rn.bf16x2 $0, l, m, a;
fma.rn.bf16x2 $1, h, m, b;
}""")
# int8: 1024 + 128 + the integer, less that.
INT8_TO_F16 = tl.constexpr("""{
.reg .b32 l, h, a;
xor.b32 a, $2, 0x80808080;
prmt.b32 l, a, 0x64646464, 0x4140;
prmt.b32 h, a, 0x64646464, 0x4342;
mov.b32 a, 0x64806480;
sub.rn.f16x2 $0, l, a;
sub.rn.f16x2 $1, h, a;
}""")


@triton.jit
def decoded(codes, CODES: tl.constexpr, dtype: tl.constexpr, NATIVE: tl.constexpr, IN_PLACE: tl.constexpr):
    """uint8 codes -> their values in `dtype`, without the scale; exact in each float type, on every GPU.

    NATIVE: the GPU has e4m3 (see `gpu.has_fp8`): four codes at a time, codes that `encoded` makes to the same values.
    IN_PLACE: where codes were loaded. Triton moves what is "pure" behind the way to a product's operand, on which the
    codes of V, which are transposed there, would go byte by byte; those of packed weights lie as they are wanted.
    """
    if NATIVE and dtype == tl.bfloat16:
        OF_FP8: tl.constexpr = E4M3_TO_BF16 if CODES == "fp8_e4m3" else E5M2_TO_BF16
        PTX: tl.constexpr = INT8_TO_BF16 if CODES == "int8" else OF_FP8
        value = tl.inline_asm_elementwise(PTX, "=r,=r,r", [codes], tl.bfloat16, is_pure=not IN_PLACE, pack=4)
    elif NATIVE and dtype == tl.float16:
        OF_FP8: tl.constexpr = E4M3_TO_F16 if CODES == "fp8_e4m3" else E5M2_TO_F16
        PTX: tl.constexpr = INT8_TO_F16 if CODES == "int8" else OF_FP8
        value = tl.inline_asm_elementwise(PTX, "=r,=r,r", [codes], tl.float16, is_pure=not IN_PLACE, pack=4)
    else:
        value = decoded_by_bits(codes, CODES, dtype)
    return value


@triton.jit
def decoded_by_bits(codes, CODES: tl.constexpr, dtype: tl.constexpr):
    """The bits of e5m2 are the upper half of a float16; those of e4m3, moved, are one that is 2^8 too small."""
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


# Four float32 -> four codes. `min` takes the other operand of a NaN; conversions to fp8 saturate.
TO_E4M3 = tl.constexpr("""{
.reg .f32 a, b, c, d;
.reg .b16 l, h;
min.f32 a, $1, 0f43E00000;
min.f32 b, $2, 0f43E00000;
min.f32 c, $3, 0f43E00000;
min.f32 d, $4, 0f43E00000;
cvt.rn.satfinite.e4m3x2.f32 l, b, a;
cvt.rn.satfinite.e4m3x2.f32 h, d, c;
mov.b32 $0, {l, h};
}""")
TO_E5M2 = tl.constexpr("""{
.reg .f32 a, b, c, d;
.reg .b16 l, h;
min.f32 a, $1, 0f47600000;
min.f32 b, $2, 0f47600000;
min.f32 c, $3, 0f47600000;
min.f32 d, $4, 0f47600000;
cvt.rn.satfinite.e5m2x2.f32 l, b, a;
cvt.rn.satfinite.e5m2x2.f32 h, d, c;
mov.b32 $0, {l, h};
}""")
# The low bytes of 1.5 * 2^23 + x: see nearest_integer.
TO_INT8 = tl.constexpr("""{
.reg .f32 a, b, c, d;
.reg .b32 i, j, k, l;
min.f32 a, $1, 0f42FE0000;
min.f32 b, $2, 0f42FE0000;
min.f32 c, $3, 0f42FE0000;
min.f32 d, $4, 0f42FE0000;
max.f32 a, a, 0fC2FE0000;
max.f32 b, b, 0fC2FE0000;
max.f32 c, c, 0fC2FE0000;
max.f32 d, d, 0fC2FE0000;
add.rn.f32 a, a, 0f4B400000;
add.rn.f32 b, b, 0f4B400000;
add.rn.f32 c, c, 0f4B400000;
add.rn.f32 d, d, 0f4B400000;
mov.b32 i, a;
mov.b32 j, b;
mov.b32 k, c;
mov.b32 l, d;
prmt.b32 i, i, j, 0x0040;
prmt.b32 k, k, l, 0x0040;
prmt.b32 $0, i, k, 0x5410;
}""")


@triton.jit
def encoded(x, CODES: tl.constexpr, LARGEST: tl.constexpr, NATIVE: tl.constexpr):
    """Values that are divided by their scale -> uint8 codes: nearest even, saturating; a NaN becomes the largest.

    NATIVE: see `decoded`; the same codes.
    """
    if NATIVE:
        OF_FP8: tl.constexpr = TO_E4M3 if CODES == "fp8_e4m3" else TO_E5M2
        PTX: tl.constexpr = TO_INT8 if CODES == "int8" else OF_FP8
        code = tl.inline_asm_elementwise(PTX, "=r,f,f,f,f", [x], tl.uint8, is_pure=True, pack=4)
    else:
        code = encoded_by_bits(x, CODES, LARGEST)
    return code


@triton.jit
def encoded_by_bits(x, CODES: tl.constexpr, LARGEST: tl.constexpr):
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


@triton.jit
def e2m1_values(code):
    """int32 codes -> float32: the bits, moved, are a float16 that is 2^14 too small."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
