"""What kernels of recurrences share: where a request's states lie, and the operands of every launch.

    grid [R + 1, parts of a state]     a program takes one part of a request's state over all its new tokens, one
                                       after the other, in float32 in registers; those of request R clear the padding

    p = context                        state after p tokens: from its block, zeros if p is 0
    to the next multiple of B, or end  state to its block, if it has one (0, the null block, is never written)

A program reads its part before it writes it, and nobody else touches that part, so a step may end in the block that
it began in. How tokens are cut into steps changes no bit: the state is kept in full.

Shapes of launches follow from shapes of operands alone, so calls can be captured in a CUDA graph. What the references
check by reading lengths and block ids is therefore not checked: a block that does not exist is neither read (the
state is then zeros) nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.recurrent.checkpoints import check_metadata_shapes
from pagebinder.custom_ops.triton.values import LOG2_E

# Of a state, 64 registers a thread: where requests have one token each, what counts is how much is on its way from
# memory. In a prompt it is how soon a token is done: half as many.
VALUES_OF_WARP = 1024
LEAST_PART = 8  # 32 bytes of a row


@triton.jit
def span_of_request(lens_ptr, starts_ptr, request):
    """(its first row, tokens before the new ones, tokens with them)."""
    first = tl.load(starts_ptr + request)
    end = tl.load(lens_ptr + request)
    return first.to(tl.int64), end - (tl.load(starts_ptr + request + 1) - first.to(tl.int32)), end


@triton.jit
def block_after(table_ptr, p, block_size, columns, num_blocks):
    """Block of the state after p tokens, int64; 0: there is none."""
    column = (p - 1) // block_size
    block = tl.load(table_ptr + column, mask=(p > 0) & (column < columns), other=0)
    return tl.where((block > 0) & (block < num_blocks), block, 0).to(tl.int64)


@triton.jit
def load_part(ptrs, mask):
    """Of a state, float32. Other threads may write what this one reads: they wait for it here."""
    part = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()
    return part


@triton.jit
def clear_rows(ptrs, mask, stride, begin, end):
    """Zeros in rows [begin, end); `ptrs` are those of row 0."""
    ptrs += begin.to(tl.int64) * stride
    for _ in tl.range(begin, end):
        tl.store(ptrs, 0.0, mask=mask)
        ptrs += stride


@triton.jit
def softplus(x):
    """log(1 + e^x), with all digits where it is small: log(1 + e) = 2 artanh(e / (2 + e)), a series in e^2 / 9."""
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    z = e / (2 + e)
    square = z * z
    series = 1.0 / 15
    for i in tl.static_range(7):
        series = series * square + 1.0 / (13 - 2 * i)
    return tl.maximum(x, 0.0) + 2 * z * series


def step_operands(
    cache, block_table, seq_lens, query_start_loc, *, num_tokens: int, block_size: int
) -> tuple:
    """(table, lens, starts, stride of the table, T, R, N, columns of the table, block size): all kernels take that.

    Raises:
        ValueError: the metadata do not fit each other.
    """
    check_metadata_shapes(block_table, seq_lens, query_start_loc, block_size)
    table = in_rows(block_table)
    sizes = (table.stride(0), num_tokens, len(seq_lens), len(cache), table.shape[1], block_size)
    return table, seq_lens.contiguous(), query_start_loc.contiguous(), *sizes


def in_rows(x: torch.Tensor | None) -> torch.Tensor | None:
    """x with a last stride of 1; a copy only if it has another."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def tile_of_state(width: int, across: int) -> tuple[int, int, int]:
    """(`width`, padded; how much of the other dimension a program takes; warps) for a state [width, across].

    Decodes have the tiles of prompts: a tile's layout is the order of its sums, and how a prompt is cut into steps
    changes no bit.
    """
    whole = triton.next_power_of_2(width)
    part = min(triton.next_power_of_2(across), max(LEAST_PART, VALUES_OF_WARP // whole))
    return whole, part, min(16, max(1, whole * part // VALUES_OF_WARP))
