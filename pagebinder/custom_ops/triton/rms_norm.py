"""`pagebinder_triton::rms_norm` and `add_rms_norm`: one pass over rows; each tail rounds where the reference rounds.

grid [row tiles]: a program holds whole rows, several if they are short
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.norm.rms_norm import TAILS
from pagebinder.custom_ops.triton.values import SIZES, rounded, through

TILE_VALUES = 2048  # that a program holds, or one row


@triton.jit
def scaled(x, root, w, dtype: tl.constexpr, TAIL: tl.constexpr):
    """x / rms with the weight, in float32: rounded to `dtype` where the tail says so, but not after the product."""
    normed = x * root
    if TAIL == "cast_scale":
        normed = through(normed, dtype) * w
    elif TAIL == "scale_cast":
        normed = normed * w
    elif TAIL == "offset":
        normed = normed * (1.0 + w)
    return normed


@triton.jit
def normed_tile(
    x_ptr, residual_ptr, w_ptr, total_ptr, stride_x, stride_residual, row, column, mask, eps, C: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """The norm of x + residual, if there is one, in float32 (see `scaled`); their sum, contiguous, goes to total.

    row [ROWS, 1] int64, column [1, BLOCK] of whole rows.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * stride_residual + column, mask=mask, other=0).to(tl.float32)
        total = rounded(x + residual, dtype)
        tl.store(total_ptr + row * C + column, total, mask=mask)
        x = total.to(tl.float32)
    root = tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None]
    w = x if w_ptr is None else tl.load(w_ptr + column, mask=column < C, other=0).to(tl.float32)
    return scaled(x, root, w, dtype, TAIL)


@triton.jit(do_not_specialize=SIZES)
def rms_norm_kernel(
    x_ptr, residual_ptr, w_ptr, out_ptr, total_ptr, stride_x, stride_residual, num_rows, eps, C: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """total = x + residual, if there is one, and the norm of it; outputs are contiguous."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < C)
    y = normed_tile(
        x_ptr, residual_ptr, w_ptr, total_ptr, stride_x, stride_residual, row, column, mask, eps, C, TAIL
    )
    tl.store(out_ptr + row * C + column, rounded(y, out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x, weight=None, *, eps, tail):
    """See `rms_norm_reference`."""
    check_norm(x, None, weight, tail)
    return norm_rows(x, None, weight, eps, tail)[0]


def add_rms_norm(x, residual, weight=None, *, eps, tail):
    """See `add_rms_norm_reference`; x and residual of one shape and dtype."""
    check_norm(x, residual, weight, tail)
    return norm_rows(x, residual, weight, eps, tail)


def check_norm(x, residual, weight, tail) -> None:
    """Raises ValueError where operands of a norm do not fit."""
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError("x and residual must have one shape and dtype")
    if tail not in TAILS:
        raise ValueError(f"unknown RMSNorm tail {tail!r}; one of {TAILS}")
    width = x.shape[-1]
    if (weight is None) != (tail == "none") or (weight is not None and weight.shape != (width,)):
        raise ValueError(f"weight must be [{width}], or None with tail 'none'")


def norm_rows(x, residual, weight, eps, tail):
    """(the norm of x, or of x + residual if there is one; that sum or None)."""
    width = x.shape[-1]
    dtype = torch.promote_types(x.dtype, weight.dtype) if tail == "cast_scale" else x.dtype
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out, total
    rows, residual_rows = (None if t is None else rows_of(t) for t in (x, residual))
    block = triton.next_power_of_2(width)
    at_once = max(1, TILE_VALUES // block)
    rms_norm_kernel[(triton.cdiv(len(rows), at_once),)](
        rows, residual_rows, weight, out, total, rows.stride(0), 0 if residual is None else residual_rows.stride(0),
        len(rows), eps, C=width, BLOCK=block, ROWS=at_once, TAIL=tail, num_warps=warps_of(block * at_once),
    )  # fmt: skip
    return out, total


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., C] as [rows, C] with a last stride of 1; a copy only if its strides allow no other way."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def warps_of(values: int) -> int:
    """Warps of a program that holds so many values: 16 a thread."""
    return min(16, max(1, values // 512))
