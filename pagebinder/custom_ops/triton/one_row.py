"""One row of x through linear layers, with the norm before them and the gate behind them in the same launch.

    grid [programs that stay]      each makes the row once and keeps it in registers; rows of weights stream by
    x (+ residual) -> norm -> rows 0 .. ROWS-1 of the weights, rows at PROGRAMS * ROWS, ... -> y

Weights of layers that read the same x are numbered one behind the other; the next tiles of a program are on their way
while it sums up one. The first program writes x + residual.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.triton.gated_activation import activated
from pagebinder.custom_ops.triton.gpu import multiprocessors
from pagebinder.custom_ops.triton.rms_norm import scaled
from pagebinder.custom_ops.triton.values import rounded, through

MAX_INNER = 8192  # channels of x, in registers: of more, the loop over k of `linear.py` is faster
AT_ONCE = 3  # layers of a launch


class RowTile(NamedTuple):
    """Values of a weight that a program holds at a time; of one with a gate, half of them are of either."""

    values: int
    warps: int
    stages: int
    programs: int  # that share a multiprocessor


class Norm(NamedTuple):
    """What is done with the row first; x + residual [1, K], if there is one, goes to total. weight: [K] or None."""

    residual: torch.Tensor | None
    weight: torch.Tensor | None
    total: torch.Tensor | None
    eps: float
    tail: str


NO_NORM = Norm(None, None, None, 0.0, "")  # x is taken as it is

# channels of x, padded, at most -> layers, layers with a gate; as many warps, so that sums are made in the same order
TILES = (
    (2048, RowTile(4096, 2, 3, 12), RowTile(4096, 2, 3, 12)),
    (MAX_INNER, RowTile(8192, 4, 2, 8), RowTile(16384, 4, 3, 3)),
)


@triton.jit
def row_of_x(
    x_ptr, residual_ptr, norm_ptr, total_ptr, eps, K: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr
):
    """[1, BLOCK] float32: the row, normed if there is a TAIL; zeros beyond K."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    k = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + k, mask=k < K, other=0).to(tl.float32)
    if TAIL != "":
        w = x
        if norm_ptr is not None:
            w = tl.load(norm_ptr + k, mask=k < K, other=0).to(tl.float32)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + k, mask=k < K, other=0).to(tl.float32)
            total = rounded(x + residual, dtype)
            if tl.program_id(0) == 0:
                tl.store(total_ptr + k, total, mask=k < K)
            x = total.to(tl.float32)
        root = tl.rsqrt(tl.sum(x * x, 1) / K + eps)[:, None]
        x = through(scaled(x, root, w, dtype, TAIL), dtype)
    return x


@triton.jit
def load_weight_rows(
    w_ptr, stride, first, N, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr
):
    """[ROWS, BLOCK], zeros beyond the weight [N, K]."""
    n, k = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    ptrs = w_ptr + n[:, None].to(tl.int64) * stride + k
    if EVEN and K == BLOCK:
        w = tl.load(ptrs)
    elif EVEN:
        w = tl.load(ptrs, mask=(k < K) & (n >= 0)[:, None], other=0)
    else:
        w = tl.load(ptrs, mask=(k < K) & (n < N)[:, None], other=0)
    return w


@triton.jit
def row_linears_kernel(
    x_ptr, residual_ptr, norm_ptr, total_ptr, w_0_ptr, w_1_ptr, w_2_ptr, bias_0_ptr, bias_1_ptr, bias_2_ptr,
    out_0_ptr, out_1_ptr, out_2_ptr, eps, N_0, N_1, N_2, stride_w0, stride_w1, stride_w2, K: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """A weight that is not there has no rows."""
    x = row_of_x(x_ptr, residual_ptr, norm_ptr, total_ptr, eps, K, BLOCK, TAIL)
    tiles_0, tiles_1 = tl.cdiv(N_0, ROWS), tl.cdiv(N_1, ROWS)
    tiles = tiles_0 + tiles_1 + tl.cdiv(N_2, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        # Chosen without branches: a loop with some is not a pipeline.
        in_0, in_1 = tile < tiles_0, tile < tiles_0 + tiles_1
        w_ptr = tl.multiple_of(tl.where(in_0, w_0_ptr, tl.where(in_1, w_1_ptr, w_2_ptr)), 16)
        stride = tl.multiple_of(tl.where(in_0, stride_w0, tl.where(in_1, stride_w1, stride_w2)), 16)
        out_ptr = tl.where(in_0, out_0_ptr, tl.where(in_1, out_1_ptr, out_2_ptr))
        N = tl.where(in_0, N_0, tl.where(in_1, N_1, N_2))
        first = (tile - tl.where(in_0, 0, tl.where(in_1, tiles_0, tiles_0 + tiles_1))) * ROWS
        w = load_weight_rows(w_ptr, stride, first, N, K, BLOCK, ROWS, EVEN)
        y = tl.sum(w.to(tl.float32) * x, 1)
        n = first + tl.arange(0, ROWS)
        if bias_0_ptr is not None:
            bias_ptr = tl.where(in_0, bias_0_ptr, tl.where(in_1, bias_1_ptr, bias_2_ptr))
            y += tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)
        tl.store(out_ptr + n, rounded(y, out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def row_gated_kernel(
    x_ptr, residual_ptr, norm_ptr, total_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, out_ptr, eps, N,
    stride_gate, stride_up, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, TAIL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = row_of_x(x_ptr, residual_ptr, norm_ptr, total_ptr, eps, K, BLOCK, TAIL)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        first = tile * ROWS
        n = first + tl.arange(0, ROWS)
        w_gate = load_weight_rows(gate_ptr, stride_gate, first, N, K, BLOCK, ROWS, EVEN)
        w_up = load_weight_rows(up_ptr, stride_up, first, N, K, BLOCK, ROWS, EVEN)
        gate, up = tl.sum(w_gate.to(tl.float32) * x, 1), tl.sum(w_up.to(tl.float32) * x, 1)
        if gate_bias_ptr is not None:
            gate += tl.load(gate_bias_ptr + n, mask=n < N, other=0).to(tl.float32)
        if up_bias_ptr is not None:
            up += tl.load(up_bias_ptr + n, mask=n < N, other=0).to(tl.float32)
        y = through(activated(through(gate, dtype), ACTIVATION), dtype) * through(up, dtype)
        tl.store(out_ptr + n, rounded(y, dtype), mask=n < N)


def serves(inner: int) -> bool:
    """Can programs keep a row of x of so many channels?"""
    return inner <= MAX_INNER


def row_linears(x, weights, biases, outs, norm: Norm = NO_NORM) -> None:
    """Layers of one row x [1, K] into outs."""
    inner = x.shape[1]
    block, tile, _ = _tile(inner)
    rows = max(1, tile.values // block)
    for ws, bs, ys, sizes in launches(weights, biases, outs):
        tiles = sum(triton.cdiv(n, rows) for n in sizes)
        row_linears_kernel[(min(tiles, tile.programs * multiprocessors(x.device)),)](
            x, norm.residual, norm.weight, norm.total, *ws, *bs, *ys, norm.eps, *sizes, *(w.stride(0) for w in ws),
            **_options(norm, inner, block, rows, tile, sizes),
        )  # fmt: skip


def launches(weights, biases, outs):
    """(weights, biases, results, columns) of each launch: AT_ONCE layers; those that are missing have no columns."""
    for i in range(0, len(weights), AT_ONCE):
        ws, bs, ys = (list(part[i : i + AT_ONCE]) for part in (weights, biases, outs))
        missing = AT_ONCE - len(ws)
        sizes = [*map(len, ws), *(0,) * missing]
        yield *(part + part[:1] * missing for part in (ws, bs, ys)), sizes


def row_gated(x, gate, up, gate_bias, up_bias, out, activation: str, norm: Norm = NO_NORM) -> None:
    """act(x gate^T) * (x up^T) of one row; see `row_linears`."""
    inner = x.shape[1]
    block, _, tile = _tile(inner)
    rows = max(1, tile.values // 2 // block)
    programs = min(triton.cdiv(len(gate), rows), tile.programs * multiprocessors(x.device))
    row_gated_kernel[(programs,)](
        x, norm.residual, norm.weight, norm.total, gate, up, gate_bias, up_bias, out, norm.eps, len(gate),
        gate.stride(0), up.stride(0), **_options(norm, inner, block, rows, tile, [len(gate)]), ACTIVATION=activation,
    )  # fmt: skip


def _tile(inner: int) -> tuple[int, RowTile, RowTile]:
    block = max(16, triton.next_power_of_2(inner))
    layers, gated = next(tiles for most, *tiles in TILES if block <= most)
    return block, layers, gated


def _options(norm: Norm, inner: int, block: int, rows: int, tile: RowTile, columns: list[int]) -> dict:
    return {
        "K": inner, "BLOCK": block, "ROWS": rows, "STAGES": tile.stages, "EVEN": not any(n % rows for n in columns),
        "TAIL": norm.tail, "num_warps": tile.warps,
    }  # fmt: skip
