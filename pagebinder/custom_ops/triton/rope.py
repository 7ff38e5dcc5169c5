"""`pagebinder_triton::rope`: channels turned in pairs; products and their sum are rounded as in the reference.

grid [row tiles]: rows of x [A, B, C, D] in any strides, tables broadcast by strides of 0
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.rope.rope import STYLES
from pagebinder.custom_ops.triton.rms_norm import warps_of
from pagebinder.custom_ops.triton.values import SIZES, rounded, through

TILE_VALUES = 2048
MAX_DIMS = 4


@triton.jit
def turned(first, second, cos_first, sin_first, cos_second, sin_second, dtype: tl.constexpr):
    """A pair of channels by its angle, in float32, each step rounded to `dtype`."""
    a = through(first * cos_first, dtype) - through(second * sin_first, dtype)
    b = through(second * cos_second, dtype) + through(first * sin_second, dtype)
    return a, b


@triton.jit
def pair_columns(pair, D: tl.constexpr, STYLE: tl.constexpr):
    """(columns of a pair in x, in the tables, in the result), each (first, second)."""
    HALF: tl.constexpr = D // 2
    ARE_NEIGHBOURS: tl.constexpr = STYLE != "half" and STYLE != "chunked"
    first = 2 * pair if ARE_NEIGHBOURS else pair
    second = 2 * pair + 1 if ARE_NEIGHBOURS else pair + HALF
    HAS_WIDE_TABLES: tl.constexpr = STYLE == "half" or STYLE == "every_two"
    in_table = first if HAS_WIDE_TABLES else pair
    in_table_too = second if HAS_WIDE_TABLES else pair
    out = pair if STYLE == "deinterleaved" else first
    out_too = pair + HALF if STYLE == "deinterleaved" else second
    return first, second, in_table, in_table_too, out, out_too


@triton.jit(do_not_specialize=SIZES)
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, size_b, size_c, x_a, x_b, x_c, x_d, cos_a, cos_b, cos_c, cos_d,
    sin_a, sin_b, sin_c, sin_d, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STYLE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    a, b, c = row // (size_b * size_c), row // size_c % size_b, row % size_c
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (pair < D // 2)
    in_1, in_2, at_1, at_2, out_1, out_2 = pair_columns(pair, D, STYLE)
    x_ptr += a * x_a + b * x_b + c * x_c
    cos_ptr += a * cos_a + b * cos_b + c * cos_c
    sin_ptr += a * sin_a + b * sin_b + c * sin_c
    first = tl.load(x_ptr + in_1 * x_d, mask=mask, other=0).to(tl.float32)
    second = tl.load(x_ptr + in_2 * x_d, mask=mask, other=0).to(tl.float32)
    cos_first = tl.load(cos_ptr + at_1 * cos_d, mask=mask, other=0).to(tl.float32)
    cos_second = tl.load(cos_ptr + at_2 * cos_d, mask=mask, other=0).to(tl.float32)
    sin_first = tl.load(sin_ptr + at_1 * sin_d, mask=mask, other=0).to(tl.float32)
    sin_second = tl.load(sin_ptr + at_2 * sin_d, mask=mask, other=0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y_1, y_2 = turned(first, second, cos_first, sin_first, cos_second, sin_second, dtype)
    tl.store(out_ptr + row * D + out_1, rounded(y_1, dtype), mask=mask)
    tl.store(out_ptr + row * D + out_2, rounded(y_2, dtype), mask=mask)


def rope(x, cos, sin, *, style):
    """See `rope_reference`; x of at most 4 dimensions."""
    if style not in STYLES:
        raise ValueError(f"unknown RoPE style {style!r}; one of {STYLES}")
    columns = x.shape[-1] // (1 if style in ("half", "every_two") else 2)
    if x.dim() > MAX_DIMS or x.shape[-1] % 2 or not cos.shape[-1] == sin.shape[-1] == columns:
        raise ValueError(f"x must be up to {MAX_DIMS}-D, D even, cos and sin {columns} wide")
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    if x.numel() == 0:
        return out
    padding = (1,) * (MAX_DIMS - x.dim())
    shape = (*padding, *x.shape)
    tables = [t.expand(*shape[:-1], columns) for t in (cos, sin)]
    block = triton.next_power_of_2(shape[3] // 2)
    rows, num_rows = max(1, TILE_VALUES // (2 * block)), out.numel() // shape[3]
    rope_kernel[(triton.cdiv(num_rows, rows),)](
        x, *tables, out, num_rows, *shape[1:3], *x.reshape(shape).stride(), *tables[0].stride(), *tables[1].stride(),
        D=shape[3], BLOCK=block, ROWS=rows, STYLE=style, num_warps=warps_of(2 * block * rows), enable_fp_fusion=False,
    )  # fmt: skip
    return out
