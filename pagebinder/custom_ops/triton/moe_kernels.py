"""Kernels of mixtures of experts: a projection of slots that are sorted by expert, and the sum over a token's slots.

    expert_kernel     grid [row tiles, column tiles]       rows of one expert by its weight, then its gate
    combine_kernel    grid [T, column tiles]               sum over k, in its order, of weight * row

    sorted slots   7 2 9 | 0 4 | ...       a tile never spans two experts: those of expert e begin at number
    experts        0     | 1   |           starts[e] // BLOCK_M + e, which leaves room for the last, partly empty tile
    tiles          0  1    2     ...       of each: grids follow from shapes, and the expert of a tile from bisection

Ids outside the experts are sorted to the ends, before starts[0] and behind starts[E], where no tile looks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.attention_kernels import request_of_tile
from pagebinder.custom_ops.triton.gated_activation import activated
from pagebinder.custom_ops.triton.values import SIZES, product, rounded


@triton.jit
def tile_of_expert(starts_ptr, tile, num_experts, BLOCK_M: tl.constexpr):
    """(expert, where its rows of this tile begin, where its rows end), in sorted order; no rows: begin >= end."""
    expert = request_of_tile(starts_ptr, tile, num_experts, BLOCK_M)
    first = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1, mask=expert < num_experts, other=0)
    of_expert = tile - first // BLOCK_M - expert
    return expert, first + of_expert * BLOCK_M, tl.where(of_expert < 0, 0, end)  # before the first expert's


@triton.jit
def rows_of_tile(
    slots_ptr, begin, end, slots_per_row, BLOCK_M: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr
):
    """(which of a tile's rows there are, the rows of x, the rows of out), see expert_kernel."""
    place = begin + tl.arange(0, BLOCK_M)
    is_row = place < end
    slot = place
    if GATHER or SCATTER:
        slot = tl.load(slots_ptr + place, mask=is_row, other=0).to(tl.int32)
    row = slot // slots_per_row if GATHER else place
    to = slot if SCATTER else place
    return is_row, row, to


@triton.jit
def gated(h, up, limit, alpha, up_offset, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """`Gate` of float32 sums; a NaN passes limits."""
    if GATED and limit is not None:
        h = tl.where(h > limit, limit, h)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if ACTIVATION == "swish":
        h = h / (1 + tl.exp(-alpha * h))
    elif ACTIVATION != "":
        h = activated(h, ACTIVATION)
    if GATED:
        h *= up + up_offset
    return h


@triton.jit
def expert_kernel(
    x_ptr, slots_ptr, starts_ptr, w_ptr, bias_ptr, out_ptr, stride_x, stride_e, stride_n, stride_k, num_experts,
    slots_per_row, width, num_columns, limit, alpha, up_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """out [S, num_columns] = gate(x w^T + bias), a row a slot.

    GATHER: the row of x is slot // slots_per_row, else its place in the sorted order; SCATTER: so is the row of out.
    GATED: the weight has two columns for each of the result; ACTIVATION "": no gate at all.
    """
    expert, begin, end = tile_of_expert(starts_ptr, tl.program_id(0), num_experts, BLOCK_M)
    if begin >= end:
        return
    is_row, row, to = rows_of_tile(slots_ptr, begin, end, slots_per_row, BLOCK_M, GATHER, SCATTER)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < num_columns
    of_h = 2 * column if INTERLEAVED else column
    of_up = 2 * column + 1 if INTERLEAVED else num_columns + column
    k = tl.arange(0, BLOCK_K)
    row_ptrs = x_ptr + row.to(tl.int64)[:, None] * stride_x
    w_ptr += expert.to(tl.int64) * stride_e
    h_ptrs = w_ptr + of_h.to(tl.int64)[None, :] * stride_n
    up_ptrs = w_ptr + of_up.to(tl.int64)[None, :] * stride_n
    h = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, width, BLOCK_K):
        at = begin + k
        x = tl.load(row_ptrs + at[None, :], mask=is_row[:, None] & (at < width)[None, :], other=0)
        mask = (at < width)[:, None] & is_column[None, :]
        h = product(x, tl.load(h_ptrs + at.to(tl.int64)[:, None] * stride_k, mask=mask, other=0), h)
        if GATED:
            up = product(x, tl.load(up_ptrs + at.to(tl.int64)[:, None] * stride_k, mask=mask, other=0), up)
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * (2 * num_columns if GATED else num_columns)
        h += tl.load(bias_ptr + of_h, mask=is_column, other=0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + of_up, mask=is_column, other=0).to(tl.float32)[None, :]
    h = gated(h, up, limit, alpha, up_offset, ACTIVATION, GATED)
    out_ptrs = out_ptr + to.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out_ptrs, rounded(h, out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=SIZES)
def combine_kernel(
    rows_ptr, ids_ptr, weights_ptr, out_ptr, num_experts, num_slots, width, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(num_slots):
        slot = token * num_slots + k
        expert = tl.load(ids_ptr + slot)
        weight = tl.load(weights_ptr + slot).to(tl.float32)
        mask = (column < width) & (expert >= 0) & (expert < num_experts)
        row = tl.load(rows_ptr + slot * width + column, mask=mask, other=0).to(tl.float32)
        total += tl.where(mask, row * weight, 0.0)
    tl.store(out_ptr + token * width + column, rounded(total, out_ptr.dtype.element_ty), mask=column < width)
