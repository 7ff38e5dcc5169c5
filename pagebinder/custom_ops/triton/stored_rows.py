"""Rows of latent caches in two steps, so that loads of the next tile run while this one is decoded and multiplied.

    plain, fp8_v4, fp8_v32      (values or codes [rows, BLOCK], their scales, what is rotated)  -->  [rows, BLOCK]

See `latent_rows` for layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.attention_tile import load_columns
from pagebinder.custom_ops.triton.latent_rows import code_values, from_ue8m0, load_wide
from pagebinder.custom_ops.triton.values import rounded


@triton.jit
def fetch_row_part(
    row_ptrs, scale_ptrs, here, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
    NOPE: tl.constexpr, QUANT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Channels [FIRST, END) of rows as they are stored, for `row_part`: (values or codes, scales, bfloat16 values).

    Values and codes [rows, BLOCK], zeros where there are none. What the part does not have is values or codes again.
    """
    LAST: tl.constexpr = END if LAYOUT == "plain" or END < NOPE else NOPE
    if LAST > FIRST:
        stored = load_columns(row_ptrs, here, FIRST, LAST, BLOCK)
        scales = stored
        if LAYOUT != "plain":
            scales = fetch_scales(
                row_ptrs, scale_ptrs, here, FIRST, LAST, BLOCK // QUANT, LAYOUT, NOPE, QUANT, ALIGNED
            )
    if LAST == END:
        rope = stored
    else:
        ROPE_AT: tl.constexpr = NOPE + NOPE // QUANT * 4 if LAYOUT == "fp8_v32" else NOPE
        # They are one group of channels, or a part of their own.
        COLUMNS: tl.constexpr = QUANT if LAST > FIRST else BLOCK
        column = tl.arange(0, COLUMNS)[None, :]
        mask = here[:, None] & (column < END - NOPE)
        rope = load_wide((row_ptrs + ROPE_AT)[:, None], column, mask, tl.bfloat16, ALIGNED)
        if LAST <= FIRST:
            stored = rope
            scales = rope
    return stored, scales, rope


@triton.jit
def fetch_scales(
    row_ptrs, scale_ptrs, here, FIRST: tl.constexpr, LAST: tl.constexpr, GROUPS: tl.constexpr, LAYOUT: tl.constexpr,
    NOPE: tl.constexpr, QUANT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """[rows, GROUPS] float32 or bytes; of aligned "fp8_v4" [rows, GROUPS / 4] of four bytes."""
    group = FIRST // QUANT + tl.arange(0, GROUPS)[None, :]
    mask = here[:, None] & (group * QUANT < LAST)
    if LAYOUT == "fp8_v32":
        scales = load_wide((row_ptrs + NOPE)[:, None], group, mask, tl.float32, ALIGNED)
    elif LAYOUT == "fp8_v4" and ALIGNED and GROUPS % 4 == 0:  # Triton's pipeline takes no single bytes
        word = FIRST // QUANT // 4 + tl.arange(0, GROUPS // 4)[None, :]
        mask = here[:, None] & (word * 4 * QUANT < LAST)
        words = scale_ptrs.to(tl.pointer_type(tl.int32))
        scales = tl.load(words[:, None] + word, mask=mask, other=0x7F7F7F7F)
    else:
        scales = tl.load(scale_ptrs[:, None] + group, mask=mask, other=127)
    return scales


# Four codes * their scales (bfloat16) -> bfloat16; plus four bfloat16 values, where scales are negative. Conversion
# to halves knows NaN; products with powers of two are exact, subnormals too.
DECODED_OR_OTHER = tl.constexpr("""{
.reg .b16 a, b, c, d;
.reg .b32 l, h, m, n;
.reg .f32 e, f, g, i;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 l, a;
cvt.rn.f16x2.e4m3x2 h, b;
mov.b32 {a, b}, l;
mov.b32 {c, d}, h;
cvt.f32.f16 e, a;
cvt.f32.f16 f, b;
cvt.f32.f16 g, c;
cvt.f32.f16 i, d;
cvt.rn.bf16x2.f32 l, f, e;
cvt.rn.bf16x2.f32 h, i, g;
prmt.b32 m, $3, 0, 0xBB99;
prmt.b32 n, $4, 0, 0xBB99;
and.b32 m, $5, m;
and.b32 n, $6, n;
fma.rn.bf16x2 $0, l, $3, m;
fma.rn.bf16x2 $1, h, $4, n;
}""")


@triton.jit
def row_part(
    stored, dtype: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr, LAYOUT: tl.constexpr,
    NOPE: tl.constexpr, QUANT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """What `fetch_row_part` gives, as [rows, BLOCK] of `dtype`; decoded to bfloat16."""
    values, scales, rope = stored
    if LAYOUT != "plain":
        if FIRST >= NOPE:
            x = values
        else:
            ROWS: tl.constexpr = values.shape[0]
            GROUPS: tl.constexpr = BLOCK // QUANT
            group = FIRST // QUANT + tl.arange(0, GROUPS)[None, :]
            of_rope = group * QUANT >= NOPE
            codes = tl.reshape(values, (ROWS, GROUPS, QUANT))
            if LAYOUT == "fp8_v4" and END > NOPE and NATIVE:
                byte = tl.where(of_rope, 0x17F, scale_bytes(scales, group))
                # UE8M0 in bfloat16: 0 is 2^-127, 255 NaN. Those of the others: -1; their codes are 0.
                bits = tl.where(byte == 255, 0x7FC0, tl.maximum(byte << 7, 0x40))
                scale = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)[:, :, None]
                operands = [codes, scale, rope[:, None, :]]
                x = tl.inline_asm_elementwise(
                    DECODED_OR_OTHER, "=r,=r,r,r,r,r,r", operands, tl.bfloat16, is_pure=False, pack=4
                )
            else:
                scale = scales if LAYOUT == "fp8_v32" else from_ue8m0(scale_bytes(scales, group))
                x = code_values(codes, NATIVE) * scale[:, :, None]
                if END > NOPE:
                    x = tl.where(of_rope[:, :, None], rope.to(tl.float32)[:, None, :], x)
            x = tl.reshape(x, (ROWS, BLOCK))
        if x.dtype == tl.float32:
            x = rounded(x, tl.bfloat16)
        values = x if dtype == tl.bfloat16 else rounded(x.to(tl.float32), dtype)
    return values


@triton.jit
def scale_bytes(scales, group):
    """What `fetch_scales` gives of "fp8_v4", as int32 [rows, groups]."""
    if scales.dtype == tl.int32:
        ROWS: tl.constexpr = scales.shape[0]
        WORDS: tl.constexpr = scales.shape[1]
        words = tl.reshape(tl.broadcast_to(scales[:, :, None], (ROWS, WORDS, 4)), (ROWS, WORDS * 4))
        byte = (words >> (group % 4 * 8)) & 0xFF
    else:
        byte = scales.to(tl.int32)
    return byte
