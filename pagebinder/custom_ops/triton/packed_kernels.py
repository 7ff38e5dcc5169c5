"""Kernels over packed weights of 8 or 4 bits: the linear layer, experts, and the weight's codes in rows.

    packed_linear_kernel    grid [row tiles * column tiles, parts of k]: codes become operands in registers
    packed_expert_kernel    grid [row tiles, column tiles]: the same for slots that are sorted by expert, and a gate
    sum_parts_kernel        grid [rows, column tiles]: sums over parts of k, added in their order, become results
    unpack_kernel           grid [panels, step tiles]: codes [N, K] as other libraries take them

A panel's steps lie one after the other (`linear/weight_formats.py`), so a tile of them is read as a stream of bytes
and put in order by reshaping, which moves nothing in memory:

    bytes of a step   8 bits  [half, line of 4 k, column, odd, high]         k = 4 line + 2 high + odd
                      4 bits  [half, line of 8 k, column, odd, byte] nibble  k = 8 line + 4 byte + 2 nibble + odd
    tile              [k, column]

Codes are exact in 16 bits, and so are their products in float32; scales multiply sums. Scales that change with k
multiply the sum of their own 32, 64 or 128 k, which is then what the loop takes at a time. W_SHARES "shifted group"
is "group" with shifts behind the scales of a group and panel: they multiply the sum of x over its k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.e4m3 import e4m3_values
from pagebinder.custom_ops.triton.moe_kernels import gated, rows_of_tile, tile_of_expert
from pagebinder.custom_ops.triton.values import SIZES, decoded, e2m1_values, product, rounded

# Four bytes -> the integers of their lower halves less 8: (128 + code) - 136, or (1024 + code) - 1032.
LOW_TO_BF16 = tl.constexpr("""{
.reg .b32 a, l, h, o, m;
and.b32 a, $2, 0x0F0F0F0F;
prmt.b32 l, a, 0x43434343, 0x4140;
prmt.b32 h, a, 0x43434343, 0x4342;
mov.b32 o, 0x3F803F80;
mov.b32 m, 0xC308C308;
fma.rn.bf16x2 $0, l, o, m;
fma.rn.bf16x2 $1, h, o, m;
}""")
LOW_TO_F16 = tl.constexpr("""{
.reg .b32 a, l, h, m;
and.b32 a, $2, 0x0F0F0F0F;
prmt.b32 l, a, 0x64646464, 0x4140;
prmt.b32 h, a, 0x64646464, 0x4342;
mov.b32 m, 0x64086408;
sub.rn.f16x2 $0, l, m;
sub.rn.f16x2 $1, h, m;
}""")
HIGH_TO_BF16, HIGH_TO_F16 = (  # the same of their upper halves
    tl.constexpr(low.value.replace("and.b32 a, $2,", "shr.b32 a, $2, 4;\nand.b32 a, a,"))
    for low in (LOW_TO_BF16, LOW_TO_F16)
)


@triton.jit
def nibbles(both, dtype: tl.constexpr):
    """uint8, a code of 4 bits in each half -> (lower, upper) as numbers of bfloat16 or float16."""
    if dtype == tl.bfloat16:
        low = tl.inline_asm_elementwise(LOW_TO_BF16, "=r,=r,r", [both], tl.bfloat16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(HIGH_TO_BF16, "=r,=r,r", [both], tl.bfloat16, is_pure=True, pack=4)
    else:
        low = tl.inline_asm_elementwise(LOW_TO_F16, "=r,=r,r", [both], tl.float16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(HIGH_TO_F16, "=r,=r,r", [both], tl.float16, is_pure=True, pack=4)
    return low, high


@triton.jit
def load_codes(
    w_ptr, panel, step, num_panels, num_steps, PANELS: tl.constexpr, STEPS: tl.constexpr, BITS: tl.constexpr,
    VALUES: tl.constexpr = None,
):  # fmt: skip
    """Codes [32 STEPS, 32 PANELS] uint8 (k by column) from a panel and a step on, 0 where there are none.

    VALUES: instead of codes of 4 bits what `nibbles` makes of them.
    """
    STEP_BYTES: tl.constexpr = 128 * BITS
    number = panel + tl.arange(0, PANELS)
    byte = step * STEP_BYTES + tl.arange(0, STEPS * STEP_BYTES)
    panel_bytes = num_steps * STEP_BYTES
    mask = (number < num_panels)[:, None] & (byte < panel_bytes)[None, :]
    ptrs = w_ptr + number.to(tl.int64)[:, None] * panel_bytes + byte[None, :]
    flat = tl.load(ptrs, mask=mask, other=0)
    if BITS == 8:
        tile = tl.permute(tl.reshape(flat, (PANELS, STEPS, 2, 8, 16, 2, 2)), (1, 3, 6, 5, 0, 2, 4))
    else:
        both = tl.reshape(flat, (PANELS, STEPS, 2, 4, 16, 2, 2))
        if VALUES is None:
            low, high = both & 15, both >> 4
        else:
            low, high = nibbles(both, VALUES)
        tile = tl.permute(tl.join(low, high), (1, 3, 6, 7, 5, 0, 2, 4))
    return tl.reshape(tile, (STEPS * 32, PANELS * 32))


@triton.jit
def weight_values(codes, FORMAT: tl.constexpr, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 codes -> numbers of `dtype`: integers as the low bits of 2^23, e4m3 and e2m1 as they are."""
    if FORMAT == "e2m1":
        value = rounded(e2m1_values(codes.to(tl.int32)), dtype)
    elif NATIVE and FORMAT != "int4" and dtype != tl.float32:
        value = decoded(codes, "int8" if FORMAT == "int8" else "fp8_e4m3", dtype, NATIVE, False)
    elif FORMAT == "int4":
        value = rounded((codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0, dtype)
    elif FORMAT == "int8":
        moved = (codes.to(tl.uint32) ^ 0x80) | 0x4B000000
        value = rounded(moved.to(tl.float32, bitcast=True) - 8388736.0, dtype)
    else:
        value = e4m3_values(codes, dtype, NATIVE, False)
    return value


@triton.jit
def scale_of_sum(
    scale_ptr,
    row,
    column,
    step,
    num_rows,
    num_columns,
    num_steps,
    SHARES: tl.constexpr,
    GROUP_STEPS: tl.constexpr,
):
    """The scale of a sum over k from `step` on, where it changes with k; row, column and step broadcast."""
    groups_of_128 = (num_steps + 3) // 4
    if SHARES == "token groups":
        ptrs = scale_ptr + row.to(tl.int64) * groups_of_128 + step // 4
        scale = tl.load(ptrs, mask=(row < num_rows) & (step < num_steps), other=0.0)
    elif SHARES == "block":
        ptrs = scale_ptr + column // 128 * groups_of_128 + step // 4
        scale = tl.load(ptrs, mask=(column < num_columns) & (step < num_steps), other=0.0)
    else:
        number = column // 32 * (num_steps // GROUP_STEPS) + step // GROUP_STEPS
        if SHARES != "group":
            number = number * 2 + (1 if SHARES == "shifts" else 0)
        mask = (column < num_columns) & (step < num_steps)
        scale = tl.load(scale_ptr + number * 32 + column % 32, mask=mask, other=0.0).to(tl.float32)
    return scale


@triton.jit
def scaled_part(
    part, x, x_scale_ptr, w_scale_ptr, row, column, step, num_rows, num_columns, num_steps, W_SHARES: tl.constexpr,
    GROUP_STEPS: tl.constexpr, X_SHARES: tl.constexpr,
):  # fmt: skip
    """Sums over k from `step` on by the scales of both sides that change with k; x [.., k]: what was summed."""
    if X_SHARES == "group":
        part *= scale_of_sum(
            x_scale_ptr, row, column, step, num_rows, num_columns, num_steps, "token groups", GROUP_STEPS
        )
    if W_SHARES == "block" or W_SHARES == "group" or W_SHARES == "shifted group":
        part *= scale_of_sum(
            w_scale_ptr, row, column, step, num_rows, num_columns, num_steps, W_SHARES, GROUP_STEPS
        )
    if W_SHARES == "shifted group":
        part += tl.sum(x.to(tl.float32), -1, keep_dims=True) * scale_of_sum(
            w_scale_ptr, row, column, step, num_rows, num_columns, num_steps, "shifts", GROUP_STEPS
        )
    return part


@triton.jit
def load_operands(
    row_ptrs, w_ptr, is_row, k, panel, step, num_panels, num_steps, PANELS: tl.constexpr, STEPS: tl.constexpr,
    FORMAT: tl.constexpr, X_SHARES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """(x, w [32 STEPS, 32 PANELS]) of the type that products are made of."""
    BITS: tl.constexpr = 4 if FORMAT == "int4" or FORMAT == "e2m1" else 8
    dtype: tl.constexpr = row_ptrs.dtype.element_ty if X_SHARES == "" else tl.float16
    x = tl.load(row_ptrs + k, mask=is_row & (k < num_steps * 32), other=0)
    if X_SHARES != "":
        x = e4m3_values(x, dtype, NATIVE, True)
    if NATIVE and FORMAT == "int4" and dtype != tl.float32:
        w = load_codes(w_ptr, panel, step, num_panels, num_steps, PANELS, STEPS, BITS, dtype)
    else:
        codes = load_codes(w_ptr, panel, step, num_panels, num_steps, PANELS, STEPS, BITS)
        w = weight_values(codes, FORMAT, dtype, NATIVE)
    return x, w


@triton.jit
def finished(
    acc, x_scale_ptr, w_scale_ptr, bias_ptr, row, column, num_rows, num_columns, W_SHARES: tl.constexpr,
    X_SHARES: tl.constexpr,
):  # fmt: skip
    """Sums over all k of rows and columns, by the scales that do not change with k, and the bias."""
    if X_SHARES == "tensor":
        acc *= tl.load(x_scale_ptr)
    elif X_SHARES == "token":
        acc *= tl.load(x_scale_ptr + row, mask=row < num_rows, other=0.0)[:, None]
    if W_SHARES == "tensor":
        acc *= tl.load(w_scale_ptr)
    elif W_SHARES == "row":
        acc *= tl.load(w_scale_ptr + column, mask=column < num_columns, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=column < num_columns, other=0).to(tl.float32)[None, :]
    return acc


@triton.jit
def sums_of_panels(
    row_ptrs, is_row, row, x_scale_ptr, w_ptr, w_scale_ptr, panel, first, last, num_rows, num_panels, num_steps,
    BLOCK_M: tl.constexpr, PANELS: tl.constexpr, STEPS: tl.constexpr, SUMS: tl.constexpr, FORMAT: tl.constexpr,
    W_SHARES: tl.constexpr, GROUP_STEPS: tl.constexpr, X_SHARES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_M, 32 PANELS] over the steps [first, last), by the scales that change with k; see below."""
    BLOCK_N: tl.constexpr = PANELS * 32
    BLOCK_K: tl.constexpr = STEPS * 32 // SUMS
    HAS_PARTS: tl.constexpr = W_SHARES in ("block", "group", "shifted group") or X_SHARES == "group"
    column = panel * 32 + tl.arange(0, BLOCK_N)
    num_columns = num_panels * 32
    if SUMS == 1:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(first, last, STEPS):
            k = step * 32 + tl.arange(0, BLOCK_K)
            x, w = load_operands(
                row_ptrs[:, None], w_ptr, is_row[:, None], k[None, :], panel, step, num_panels, num_steps, PANELS,
                STEPS, FORMAT, X_SHARES, NATIVE,
            )  # fmt: skip
            if HAS_PARTS:
                acc += scaled_part(
                    product(x, w, tl.zeros((BLOCK_M, BLOCK_N), tl.float32)), x, x_scale_ptr, w_scale_ptr,
                    row[:, None], column[None, :], step, num_rows, num_columns, num_steps, W_SHARES, GROUP_STEPS,
                    X_SHARES,
                )  # fmt: skip
            else:
                acc = product(x, w, acc)
    else:
        number = tl.arange(0, SUMS)[:, None, None]
        sums = tl.zeros((SUMS, BLOCK_M, BLOCK_N), tl.float32)
        for step in range(first, last, STEPS):
            k = step * 32 + number * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
            x, w = load_operands(
                row_ptrs[None, :, None], w_ptr, is_row[None, :, None], k, panel, step, num_panels, num_steps, PANELS,
                STEPS, FORMAT, X_SHARES, NATIVE,
            )  # fmt: skip
            tiles = tl.reshape(w, (SUMS, BLOCK_K, BLOCK_N))
            sums += scaled_part(
                product(x, tiles, tl.zeros((SUMS, BLOCK_M, BLOCK_N), tl.float32)), x, x_scale_ptr, w_scale_ptr,
                row[None, :, None], column[None, None, :], step + number * (STEPS // SUMS), num_rows, num_columns,
                num_steps, W_SHARES, GROUP_STEPS, X_SHARES,
            )  # fmt: skip
        acc = tl.sum(sums, 0)
    return acc


@triton.jit(do_not_specialize=SIZES)
def packed_linear_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, stride_x, num_rows, num_panels, num_steps,
    part_steps, row_tiles, BLOCK_M: tl.constexpr, PANELS: tl.constexpr, STEPS: tl.constexpr, SUMS: tl.constexpr,
    FORMAT: tl.constexpr, W_SHARES: tl.constexpr, GROUP_STEPS: tl.constexpr, X_SHARES: tl.constexpr,
    NATIVE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [M, N] = (x * its scale) (codes * their scale)^T + bias.

    FORMAT: "e4m3", "int8", "int4" or "e2m1".
    W_SHARES: "tensor", "row", "block" of 128 x 128, "group" of 32 GROUP_STEPS, or such a "shifted group".
    X_SHARES: "" for x of numbers; else x is of e4m3 codes, with scales of the "tensor", a "token" or a "group".
    SUMS: a step of the loop makes so many sums, over 32 STEPS / SUMS of k each, which divide what shares a scale.
    PARTS: of k, of `part_steps` each, a multiple of STEPS; more than one: out [PARTS, M, N] float32 are their sums.
    Neighbouring programs take other rows of the same columns, whose weight they then find in the cache.
    """
    row = (tl.program_id(0) % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    panel = (tl.program_id(0) // row_tiles) * PANELS
    column = panel * 32 + tl.arange(0, PANELS * 32)
    num_columns = num_panels * 32
    is_row, is_column = row < num_rows, column < num_columns
    row_ptrs = x_ptr + row.to(tl.int64) * stride_x
    first, last = 0, num_steps
    if PARTS > 1:
        first = tl.program_id(1) * part_steps
        last = tl.minimum(first + part_steps, num_steps)
    acc = sums_of_panels(
        row_ptrs, is_row, row, x_scale_ptr, w_ptr, w_scale_ptr, panel, first, last, num_rows, num_panels, num_steps,
        BLOCK_M, PANELS, STEPS, SUMS, FORMAT, W_SHARES, GROUP_STEPS, X_SHARES, NATIVE,
    )  # fmt: skip
    if PARTS > 1:
        out_ptr += tl.program_id(1).to(tl.int64) * num_rows * num_columns
    else:
        acc = finished(
            acc, x_scale_ptr, w_scale_ptr, bias_ptr, row, column, num_rows, num_columns, W_SHARES, X_SHARES
        )
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out_ptrs, rounded(acc, out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def packed_expert_kernel(
    x_ptr, slots_ptr, starts_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, stride_x, scales_of_expert, num_experts,
    slots_per_row, num_panels, num_steps, limit, alpha, up_offset, BLOCK_M: tl.constexpr, PANELS: tl.constexpr,
    STEPS: tl.constexpr, SUMS: tl.constexpr, FORMAT: tl.constexpr, W_SHARES: tl.constexpr,
    GROUP_STEPS: tl.constexpr, NATIVE: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """`expert_kernel` of moe_kernels.py over packed weights: `num_panels` of each expert, PANELS of the result.

    A gate that is interleaved has both of its columns in one panel: sums of twice as many columns, which then part.
    """
    expert, begin, end = tile_of_expert(starts_ptr, tl.program_id(0), num_experts, BLOCK_M)
    if begin >= end:
        return
    is_row, row, to = rows_of_tile(slots_ptr, begin, end, slots_per_row, BLOCK_M, GATHER, SCATTER)
    row_ptrs = x_ptr + row.to(tl.int64) * stride_x
    BITS: tl.constexpr = 4 if FORMAT == "int4" or FORMAT == "e2m1" else 8
    w_ptr += expert.to(tl.int64) * num_panels * num_steps * 128 * BITS
    w_scale_ptr += expert.to(tl.int64) * scales_of_expert
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * num_panels * 32
    SIDES: tl.constexpr = 2 if GATED and INTERLEAVED else 1  # in the panels of a sum
    panel = tl.program_id(1) * PANELS * SIDES
    h = expert_sums(
        row_ptrs, is_row, w_ptr, w_scale_ptr, bias_ptr, panel, num_panels, num_steps, BLOCK_M, PANELS * SIDES, STEPS,
        SUMS, FORMAT, W_SHARES, GROUP_STEPS, NATIVE,
    )  # fmt: skip
    up = h
    num_columns = num_panels * 32
    if GATED:
        num_columns = num_columns // 2
        if INTERLEAVED:
            h, up = tl.split(tl.reshape(h, (BLOCK_M, PANELS * 32, 2)))
        else:
            up = expert_sums(
                row_ptrs, is_row, w_ptr, w_scale_ptr, bias_ptr, num_panels // 2 + panel, num_panels, num_steps,
                BLOCK_M, PANELS, STEPS, SUMS, FORMAT, W_SHARES, GROUP_STEPS, NATIVE,
            )  # fmt: skip
    h = gated(h, up, limit, alpha, up_offset, ACTIVATION, GATED)
    column = tl.program_id(1) * PANELS * 32 + tl.arange(0, PANELS * 32)
    out_ptrs = out_ptr + to.to(tl.int64)[:, None] * num_columns + column[None, :]
    mask = is_row[:, None] & (column < num_columns)[None, :]
    tl.store(out_ptrs, rounded(h, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def expert_sums(
    row_ptrs, is_row, w_ptr, w_scale_ptr, bias_ptr, panel, num_panels, num_steps, BLOCK_M: tl.constexpr,
    PANELS: tl.constexpr, STEPS: tl.constexpr, SUMS: tl.constexpr, FORMAT: tl.constexpr, W_SHARES: tl.constexpr,
    GROUP_STEPS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows by some panels of one expert, by all scales, and the bias."""
    row, column = tl.arange(0, BLOCK_M), panel * 32 + tl.arange(0, PANELS * 32)
    acc = sums_of_panels(
        row_ptrs, is_row, row, None, w_ptr, w_scale_ptr, panel, 0, num_steps, BLOCK_M, num_panels, num_steps, BLOCK_M,
        PANELS, STEPS, SUMS, FORMAT, W_SHARES, GROUP_STEPS, "", NATIVE,
    )  # fmt: skip
    return finished(acc, None, w_scale_ptr, bias_ptr, row, column, BLOCK_M, num_panels * 32, W_SHARES, "")


@triton.jit(do_not_specialize=SIZES)
def sum_parts_kernel(
    part_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, num_rows, num_columns, BLOCK_N: tl.constexpr,
    W_SHARES: tl.constexpr, X_SHARES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [M, N] of sums [PARTS, M, N] float32 over parts of k."""
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    mask = (column < num_columns)[None, :]
    acc = tl.zeros((1, BLOCK_N), tl.float32)
    for part in tl.static_range(PARTS):
        acc += tl.load(part_ptr + part * num_rows * num_columns + place, mask=mask, other=0.0)
    acc = finished(
        acc, x_scale_ptr, w_scale_ptr, bias_ptr, row, column, num_rows, num_columns, W_SHARES, X_SHARES
    )
    tl.store(out_ptr + place, rounded(acc, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def unpack_kernel(w_ptr, out_ptr, num_panels, num_steps, STEPS: tl.constexpr):
    """Packed codes of 8 bits -> [N, K] uint8."""
    panel, step = tl.program_id(0), tl.program_id(1) * STEPS
    codes = load_codes(w_ptr, panel, step, num_panels, num_steps, 1, STEPS, 8)
    k, column = step * 32 + tl.arange(0, STEPS * 32), panel * 32 + tl.arange(0, 32)
    ptrs = out_ptr + column.to(tl.int64)[None, :] * (num_steps * 32) + k[:, None]
    tl.store(ptrs, codes, mask=(k < num_steps * 32)[:, None])
