"""`pagebinder_triton::scaled_fp8_quant`, and ops that make activations with their quantisation.

    grid [row tiles, column tiles]       rows in float32, rounded as the separate ops round --store_quantised--> codes

    SHARES      what a tile does                                                        tiles
    "token"     a scale for each row                                                    whole rows
    "group"     a scale for each 128 neighbours                                         whole groups
    "given"     takes the scale that is given, and hands it on                          any
    "collect"   raises the tensor's largest magnitude, atomically; stores its values    any, and then
    "largest"   takes the scale of that magnitude, and hands it on                      any

A dynamic scale of a tensor is two launches, as it needs all values before the first code. A norm needs whole rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.activation.gated_activation import ACTIVATIONS
from pagebinder.custom_ops.fp8.quant import GROUP, MIN_SCALE, check_quant, empty_quantised
from pagebinder.custom_ops.norm.rms_norm import TAILS
from pagebinder.custom_ops.triton.e4m3 import e4m3_codes, magnitude_bits, scale_of
from pagebinder.custom_ops.triton.gated_activation import activated
from pagebinder.custom_ops.triton.gpu import has_fp8
from pagebinder.custom_ops.triton.rms_norm import normed_tile, rows_of, warps_of
from pagebinder.custom_ops.triton.values import SIZES, rounded, through

TILE_VALUES = 2048  # that a program holds, or one row


@triton.jit
def tile_of_rows(num_rows, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(row [ROWS, 1] int64, column [1, BLOCK], which of them exist)."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < num_rows) & (column < C)


@triton.jit
def store_quantised(
    y, row, column, mask, out_ptr, scale_ptr, given_ptr, num_rows, C: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, SHARES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A tile of float32 values, zeros where there are none, as codes (or values: "collect"); see the table above."""
    bits = magnitude_bits(y)
    if SHARES == "collect":
        most = tl.max(tl.max(bits, 1), 0)
        tl.atomic_max(given_ptr, most, mask=most > tl.load(given_ptr), sem="relaxed")
        if out_ptr is not None:
            tl.store(out_ptr + row * C + column, rounded(y, out_ptr.dtype.element_ty), mask=mask)
    else:
        if SHARES == "token":
            scale = scale_of(tl.max(bits, 1))[:, None]
            tl.store(scale_ptr + row, scale, mask=row < num_rows)
            wide = tl.zeros_like(y) + scale
        elif SHARES == "group":
            GROUPS: tl.constexpr = BLOCK // 128
            scale = scale_of(tl.max(tl.reshape(bits, (ROWS, GROUPS, 128)), 2))
            number = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[None, :]
            ALL: tl.constexpr = (C + 127) // 128
            tl.store(scale_ptr + row * ALL + number, scale, mask=(row < num_rows) & (number < ALL))
            shared = tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, 128))
            wide = tl.reshape(shared, (ROWS, BLOCK))
        else:
            scale = tl.load(given_ptr)
            if SHARES == "largest":
                scale = scale_of(scale)
            if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
                tl.store(scale_ptr, scale)
            wide = tl.zeros_like(y) + scale
        tl.store(out_ptr + row * C + column, e4m3_codes(tl.div_rn(y, wide), NATIVE), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def quantise_kernel(
    x_ptr, out_ptr, scale_ptr, given_ptr, stride_x, num_rows, C: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, SHARES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    row, column, mask = tile_of_rows(num_rows, C, BLOCK, ROWS)
    x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0).to(tl.float32)
    store_quantised(
        x, row, column, mask, out_ptr, scale_ptr, given_ptr, num_rows, C, BLOCK, ROWS, SHARES, NATIVE
    )


@triton.jit(do_not_specialize=SIZES)
def gate_quantise_kernel(
    gate_ptr, up_ptr, out_ptr, scale_ptr, given_ptr, stride_gate, stride_up, num_rows, C: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr, NATIVE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, column, mask = tile_of_rows(num_rows, C, BLOCK, ROWS)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=mask, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + column, mask=mask, other=0).to(tl.float32)
    y = through(through(activated(gate, ACTIVATION), dtype) * up, dtype)
    store_quantised(
        y, row, column, mask, out_ptr, scale_ptr, given_ptr, num_rows, C, BLOCK, ROWS, SHARES, NATIVE
    )


@triton.jit(do_not_specialize=SIZES)
def norm_quantise_kernel(
    x_ptr, residual_ptr, w_ptr, total_ptr, out_ptr, scale_ptr, given_ptr, stride_x, stride_residual, num_rows, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr, NATIVE: tl.constexpr,
    TAIL: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """IS_WIDE: the norm's result is float32, whatever x is (a weight of another dtype, with "cast_scale")."""
    row, column, mask = tile_of_rows(num_rows, C, BLOCK, ROWS)
    y = normed_tile(
        x_ptr, residual_ptr, w_ptr, total_ptr, stride_x, stride_residual, row, column, mask, eps, C, TAIL
    )
    if not IS_WIDE:
        y = through(y, x_ptr.dtype.element_ty)
    store_quantised(
        y, row, column, mask, out_ptr, scale_ptr, given_ptr, num_rows, C, BLOCK, ROWS, SHARES, NATIVE
    )


def scaled_fp8_quant(x, scale=None, *, granularity):
    """See `scaled_fp8_quant_reference`."""
    check_quant(scale, granularity)
    if x.numel() == 0:
        return _empty(x, scale, granularity)
    rows = rows_of(x)

    def launch(out, scales, given, shares):
        grid, sizes = _tiles(rows.shape, shares, rows.device)
        quantise_kernel[grid](rows, out, scales, given, rows.stride(0), len(rows), **sizes)

    return _quantised(launch, x, scale, granularity, rows)


def gated_activation_fp8_quant(gate, up, scale=None, *, activation, granularity):
    """See `gated_activation_fp8_quant_reference`."""
    check_quant(scale, granularity)
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; one of {', '.join(ACTIVATIONS)}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError("gate and up must have one shape and dtype")
    if gate.numel() == 0:
        return _empty(gate, scale, granularity)
    gates, ups = rows_of(gate), rows_of(up)

    def launch(out, scales, given, shares):
        grid, sizes = _tiles(gates.shape, shares, gates.device)
        gate_quantise_kernel[grid](
            gates, ups, out, scales, given, gates.stride(0), ups.stride(0), len(gates), **sizes, ACTIVATION=activation
        )  # fmt: skip

    return _quantised(launch, gate, scale, granularity)


def rms_norm_fp8_quant(x, weight=None, scale=None, *, eps, tail, granularity):
    """See `rms_norm_fp8_quant_reference`."""
    return _norm(x, None, weight, scale, eps, tail, granularity)[:2]


def add_rms_norm_fp8_quant(x, residual, weight=None, scale=None, *, eps, tail, granularity):
    """See `add_rms_norm_fp8_quant_reference`; x and residual of one shape and dtype."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError("x and residual must have one shape and dtype")
    return _norm(x, residual, weight, scale, eps, tail, granularity)


def _norm(x, residual, weight, scale, eps, tail, granularity):
    check_quant(scale, granularity)
    if tail not in TAILS:
        raise ValueError(f"unknown RMSNorm tail {tail!r}; one of {TAILS}")
    width = x.shape[-1]
    if (weight is None) != (tail == "none") or (weight is not None and weight.shape != (width,)):
        raise ValueError(f"weight must be [{width}], or None with tail 'none'")
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return *_empty(x, scale, granularity), total
    rows, residual_rows = (None if t is None else rows_of(t) for t in (x, residual))
    strides = rows.stride(0), 0 if residual is None else residual_rows.stride(0)
    dtype = torch.promote_types(x.dtype, weight.dtype) if tail == "cast_scale" else x.dtype

    def launch(out, scales, given, shares):
        grid, sizes = _tiles(rows.shape, shares, rows.device, whole_rows=True)
        norm_quantise_kernel[grid](
            rows, residual_rows, weight, total, out, scales, given, *strides, len(rows), eps, **sizes, TAIL=tail,
            IS_WIDE=dtype != x.dtype,
        )  # fmt: skip

    return *_quantised(launch, x, scale, granularity, dtype=dtype), total


def _quantised(launch, x, scale, granularity, rows=None, dtype=None):
    """(codes, scale) by launch(out, scales, given, SHARES), which makes rows of x's shape.

    `rows`: they are there already. `dtype`: of the rows, if not x's.
    """
    codes, scales = empty_quantised(x, granularity)
    code_bytes = codes.view(torch.uint8)
    if granularity != "tensor":
        launch(code_bytes, scales, None, granularity)
    elif scale is not None:
        launch(code_bytes, scales, scale, "given")
    else:
        largest = torch.zeros(1, dtype=torch.int32, device=x.device)
        made = None if rows is not None else x.new_empty((x.numel() // x.shape[-1], x.shape[-1]), dtype=dtype)
        launch(made, None, largest, "collect")
        rows = made if rows is None else rows
        grid, sizes = _tiles(rows.shape, "largest", x.device)
        quantise_kernel[grid](rows, code_bytes, scales, largest, rows.stride(0), len(rows), **sizes)
    return codes, scales


def _tiles(shape, shares: str, device: torch.device, *, whole_rows: bool = False):
    """(grid, constants and launch options) for rows [n, C]."""
    num_rows, width = shape
    block = triton.next_power_of_2(width)
    if not whole_rows and shares != "token":
        block = min(block, TILE_VALUES)
    if shares == "group":
        block = max(block, GROUP)
    rows = max(1, TILE_VALUES // block)
    sizes = {
        "C": width, "BLOCK": block, "ROWS": rows, "SHARES": shares, "NATIVE": has_fp8(device),
        "num_warps": warps_of(block * rows),
    }  # fmt: skip
    return (triton.cdiv(num_rows, rows), triton.cdiv(width, block)), sizes


def _empty(x, scale, granularity):
    """What is made of no values."""
    codes, scales = empty_quantised(x, granularity)
    return codes, scales.fill_(MIN_SCALE) if scale is None else scale.clone()
