"""`pagebinder_triton::linear`, `linears`, `gated_linear`, `norm_linears`: kernels for few rows; beyond them the
library's product.

A decode's products are bound by reading weights. A program streams rows of one weight past all rows of x, so layers
that read the same x are one launch, which fills the GPU where the smallest of them would not, and a gate needs no
launch of its own.

    rows of x    by                                      tiles: weight rows x k, warps, stages
    1            sums in registers, the norm before      one_row.TILES; of more than 8,192 channels ONE_ROW,
                 them in the same launch                 GATED_ONE_ROW, and a launch for the norm
    <= 16        tensor cores, x padded to 16 rows       FEW_ROWS, GATED_FEW_ROWS
    beyond       torch (cuBLAS), each layer by itself

float32 is the library's at any number of rows: its products need exact sums, which tensor cores do not make.

Tiles are the best of some 30 on an H200 with the layers of a Llama of 8B, see docs/measurements.md. Launches that
come before the one in front has ended (programmatic dependent launch), with first lines of weights asked for ahead,
gained nothing there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.activation.gated_activation import ACTIVATIONS
from pagebinder.custom_ops.linear.gated_linear import check_alike
from pagebinder.custom_ops.linear.linears import bias_of_each
from pagebinder.custom_ops.linear.norm_linears import check_gate, layers_of
from pagebinder.custom_ops.triton.gated_activation import activated, gate_into
from pagebinder.custom_ops.triton.one_row import Norm, launches, row_gated, row_linears, serves
from pagebinder.custom_ops.triton.rms_norm import check_norm, norm_rows, rows_of
from pagebinder.custom_ops.triton.values import SIZES, product, rounded, through

MAX_ROWS = 16  # of x
GRAIN = 16  # of k: rows of weights begin at multiples of 32 bytes, so loads are wide


class Tile(NamedTuple):
    rows: int  # of the weight
    inner: int
    warps: int
    stages: int


ONE_ROW, FEW_ROWS = Tile(8, 512, 4, 3), Tile(32, 256, 4, 4)
GATED_ONE_ROW, GATED_FEW_ROWS = Tile(4, 1024, 4, 3), Tile(32, 128, 4, 6)


@triton.jit
def products(
    x_ptr, w_ptr, up_ptr, stride_x, stride_w, stride_up, num_rows, first, N, K, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] float32: rows `first` and on of a weight [N, K] times all rows of x; and of a second weight,
    if there is one, in the same loop, so that rows of both are on their way from memory. BLOCK_M of 1: one row of x.
    EVEN: tiles have neither rows nor k beyond the end.
    """
    n, m, k = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * stride_w + k[None, :]
    up_ptrs = w_ptrs if up_ptr is None else up_ptr + n[:, None].to(tl.int64) * stride_up + k[None, :]
    is_token = (m < num_rows)[None, :]
    COLUMNS: tl.constexpr = BLOCK_K if BLOCK_M == 1 else BLOCK_M
    acc = tl.zeros((BLOCK_N, COLUMNS), tl.float32)
    acc_up = tl.zeros((BLOCK_N, COLUMNS), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        exists = k0 + k < K
        mask = None if EVEN else (n < N)[:, None] & exists[None, :]
        nothing = None if EVEN else 0
        w = tl.load(w_ptrs + k0, mask=mask, other=nothing)
        up = w if up_ptr is None else tl.load(up_ptrs + k0, mask=mask, other=nothing)
        if BLOCK_M == 1:
            x = tl.load(x_ptr + k0 + k, mask=None if EVEN else exists, other=nothing)
            acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
            if up_ptr is not None:
                acc_up += up.to(tl.float32) * x.to(tl.float32)[None, :]
        else:
            x_ptrs = x_ptr + m[None, :].to(tl.int64) * stride_x + (k0 + k)[:, None]
            x = tl.load(x_ptrs, mask=is_token if EVEN else is_token & exists[:, None], other=0)
            acc = product(w, x, acc)
            if up_ptr is not None:
                acc_up = product(up, x, acc_up)
    if BLOCK_M == 1:
        acc, acc_up = tl.sum(acc, 1)[:, None], tl.sum(acc_up, 1)[:, None]
    return acc, acc_up


@triton.jit
def with_bias(y, bias_ptr, first, N, BLOCK_N: tl.constexpr):
    if bias_ptr is not None:
        n = first + tl.arange(0, BLOCK_N)
        y += tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)[:, None]
    return y


@triton.jit
def store_columns(out_ptr, y, first, N, num_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    n, m = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    mask = (n < N)[:, None] & (m < num_rows)[None, :]
    ptrs = out_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(ptrs, rounded(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def linears_kernel(
    x_ptr, w_0_ptr, w_1_ptr, w_2_ptr, bias_0_ptr, bias_1_ptr, bias_2_ptr, out_0_ptr, out_1_ptr, out_2_ptr, stride_x,
    num_rows, N_0, N_1, N_2, K, stride_w0, stride_w1, stride_w2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Programs take the rows of the weights one after the other; a weight that is not there has no rows."""
    tile = tl.program_id(0)
    tiles_0, tiles_1 = tl.cdiv(N_0, BLOCK_N), tl.cdiv(N_1, BLOCK_N)
    # One loop serves them all: each of three would have shared memory of its own.
    if tile < tiles_0:
        w_ptr, bias_ptr, out_ptr, N, stride_w = w_0_ptr, bias_0_ptr, out_0_ptr, N_0, stride_w0
    elif tile < tiles_0 + tiles_1:
        w_ptr, bias_ptr, out_ptr, N, stride_w = w_1_ptr, bias_1_ptr, out_1_ptr, N_1, stride_w1
        tile -= tiles_0
    else:
        w_ptr, bias_ptr, out_ptr, N, stride_w = w_2_ptr, bias_2_ptr, out_2_ptr, N_2, stride_w2
        tile -= tiles_0 + tiles_1
    first = tile * BLOCK_N
    y, _ = products(
        x_ptr, w_ptr, None, stride_x, stride_w, 0, num_rows, first, N, K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, EVEN
    )  # fmt: skip
    y = with_bias(y, bias_ptr, first, N, BLOCK_N)
    store_columns(out_ptr, y, first, N, num_rows, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=SIZES)
def gated_linear_kernel(
    x_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, out_ptr, stride_x, num_rows, N, K, stride_gate, stride_up,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    gate, up = products(
        x_ptr, gate_ptr, up_ptr, stride_x, stride_gate, stride_up, num_rows, first, N, K, BLOCK_M, BLOCK_N, BLOCK_K,
        STAGES, EVEN,
    )  # fmt: skip
    gate = with_bias(gate, gate_bias_ptr, first, N, BLOCK_N)
    up = with_bias(up, up_bias_ptr, first, N, BLOCK_N)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = through(activated(through(gate, dtype), ACTIVATION), dtype) * through(up, dtype)
    store_columns(out_ptr, y, first, N, num_rows, BLOCK_M, BLOCK_N)


def linear(x, weight, bias=None):
    """See `linear_reference`."""
    return linears(x, [weight], [] if bias is None else [bias])[0]


def linears(x, weights, biases):
    """See `linears_reference`."""
    biases = bias_of_each(weights, biases)
    if not _is_ours(x, weights, biases):
        return [torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases)]
    outs, rows = _outputs(x, weights), rows_of(x)
    if _is_one_row(rows):
        row_linears(rows, weights, biases, outs)
        return outs
    tile = ONE_ROW if len(rows) == 1 else FEW_ROWS
    for ws, bs, ys, sizes in launches(weights, biases, outs):
        linears_kernel[(sum(triton.cdiv(n, tile.rows) for n in sizes),)](
            rows, *ws, *bs, *ys, rows.stride(0), len(rows), *sizes, rows.shape[1], *(w.stride(0) for w in ws),
            **_options(rows, tile, *sizes),
        )  # fmt: skip
    return outs


def gated_linear(x, gate, up, gate_bias=None, up_bias=None, *, activation):
    """See `gated_linear_reference`."""
    check_alike(gate, up)
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; one of {', '.join(ACTIVATIONS)}")
    if not _is_ours(x, [gate, up], [gate_bias, up_bias]):
        parts = [torch.nn.functional.linear(x, w, b) for w, b in ((gate, gate_bias), (up, up_bias))]
        return gate_into(parts[0], *parts, activation)
    (out,) = _outputs(x, [gate])
    rows, (columns, inner) = rows_of(x), gate.shape
    if _is_one_row(rows):
        row_gated(rows, gate, up, gate_bias, up_bias, out, activation)
        return out
    tile = GATED_ONE_ROW if len(rows) == 1 else GATED_FEW_ROWS
    gated_linear_kernel[(triton.cdiv(columns, tile.rows),)](
        rows, gate, up, gate_bias, up_bias, out, rows.stride(0), len(rows), columns, inner, gate.stride(0),
        up.stride(0), **_options(rows, tile, columns), ACTIVATION=activation,
    )  # fmt: skip
    return out


def norm_linears(x, residual, norm_weight, weights, biases, *, eps, tail, activation=""):
    """See `norm_linears_reference`; of more than one row, the norm is a launch of its own."""
    check_norm(x, residual, norm_weight, tail)
    every, total = bias_of_each(weights, biases), None
    are_alike = all(t is None or t.dtype == x.dtype for t in (residual, norm_weight))
    if not (are_alike and _is_one_row(x) and _is_ours(x, weights, every)):
        normed, total = norm_rows(x, residual, norm_weight, eps, tail)
        outs = layers_of(normed, weights, biases, activation, linears=linears, gated_linear=gated_linear)
    else:
        if residual is not None:
            residual, total = rows_of(residual), torch.empty_like(x, memory_format=torch.contiguous_format)
        norm = Norm(residual, norm_weight, total, eps, tail)
        if activation:
            check_gate(weights)
            outs = _outputs(x, weights[:1])
            row_gated(rows_of(x), *weights, *every, *outs, activation, norm)
        else:
            outs = _outputs(x, weights)
            row_linears(rows_of(x), weights, every, outs, norm)
    return [*outs, *([] if total is None else [total])]


def _is_one_row(x: torch.Tensor) -> bool:
    """Is it one that programs can keep?"""
    return x.numel() == x.shape[-1] and serves(x.shape[-1])


def _options(rows: torch.Tensor, tile: Tile, *columns: int) -> dict:
    """Of a launch over weights of so many columns of results."""
    num_rows, inner = rows.shape
    return {
        "BLOCK_M": 1 if num_rows == 1 else max(16, triton.next_power_of_2(num_rows)), "BLOCK_N": tile.rows,
        "BLOCK_K": tile.inner, "STAGES": tile.stages,
        "EVEN": inner % tile.inner == 0 and not any(n % tile.rows for n in columns), "num_warps": tile.warps,
    }  # fmt: skip


def _is_ours(x, weights, biases) -> bool:
    """Do kernels of ours serve this? What is wrong with operands, torch says."""
    inner = x.shape[-1]
    num_rows = x.numel() // max(inner, 1)
    return (
        0 < num_rows <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and inner % GRAIN == 0
        and all(w.dtype == x.dtype and w.shape[1:] == (inner,) and w.stride(1) == 1 for w in weights)
        and all(w.stride(0) % GRAIN == 0 and len(w) for w in weights)
        and all(b is None or (b.dtype == x.dtype and b.shape == w.shape[:1] and b.stride(0) == 1)
                for w, b in zip(weights, biases))
    )  # fmt: skip


def _outputs(x, weights) -> list[torch.Tensor]:
    return [x.new_empty((*x.shape[:-1], len(w))) for w in weights]
