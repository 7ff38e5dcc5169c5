"""Which rows of the caches a query token attends to: tokens of its window, then entries, each in whole tiles.

    k                    0                  window tiles * BLOCK_N                            tiles * BLOCK_N
    rows of a query      | tokens p - WINDOW < j <= p | - |  entries listed, or all w < (p + 1) // RATIO | - |
    row k                block * rows of a block + place in it; -1: not there

`list_rows_kernel`, grid [T, parts of PART], looks lists up in block tables beforehand: attention then has one number
to wait for before a row, which Triton's pipeline fetches a tile ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.values import SIZES

REQUESTS_AT_ONCE = tl.constexpr(256)


@triton.jit
def request_of_token(starts_ptr, token, num_requests):
    """The last r in [0, num_requests] that begins at or before a token; num_requests is padding.

    Counted: a bisection would wait for one start after the other.
    """
    request = 0
    for first in range(0, num_requests, REQUESTS_AT_ONCE):
        r = first + tl.arange(0, REQUESTS_AT_ONCE)
        mask = r < num_requests
        start = tl.load(starts_ptr + 1 + r, mask=mask, other=0)
        request += tl.sum((mask & (start <= token)).to(tl.int32), 0)
    return request


@triton.jit
def position_of(starts_ptr, lens_ptr, token, num_requests):
    """(request of a token or num_requests, its position; below 0 for padding)."""
    request = request_of_token(starts_ptr, token, num_requests)
    is_token = request < num_requests
    end = tl.load(starts_ptr + request + 1, mask=is_token, other=0)
    p = tl.load(lens_ptr + request, mask=is_token, other=0) - end + token
    return request, tl.where(is_token, tl.maximum(p, -1), -1)


@triton.jit
def tiles_of_query(
    p, window_capacity, entry_capacity, WINDOW: tl.constexpr, RATIO: tl.constexpr, LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(tiles of the window, tiles in all) of the query at position p. LISTED: entries in its list; None: no list."""
    num_window = tl.maximum(tl.minimum(p + 1, window_capacity) - tl.maximum(p - WINDOW + 1, 0), 0)
    num_entries = tl.minimum((p + 1) // RATIO, entry_capacity)
    if LISTED is not None:
        num_entries = tl.where(num_entries > 0, LISTED, 0)
    window_tiles = tl.cdiv(num_window, BLOCK_N)
    return window_tiles, window_tiles + tl.cdiv(num_entries, BLOCK_N)


@triton.jit
def rows_of_tile(
    tile, window_tiles, p, window_table_ptr, entry_table_ptr, window_blocks, window_capacity, entry_blocks,
    entry_capacity, WINDOW_N: tl.constexpr, ENTRY_N: tl.constexpr, WINDOW: tl.constexpr, ENTRY_WINDOW: tl.constexpr,
    RATIO: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(block, token or entry, whether it is there) of a tile of the window, or of all entries, which are in order."""
    of_window = tile < window_tiles
    lowest = tl.maximum(p - WINDOW + 1, 0)
    lowest_entry = tl.maximum(p - ENTRY_WINDOW + 1, 0) if ENTRY_WINDOW > 0 else 0
    low = tl.where(of_window, lowest, lowest_entry)
    high = tl.where(
        of_window, tl.minimum(p + 1, window_capacity), tl.minimum((p + 1) // RATIO, entry_capacity)
    )
    begin = tl.where(of_window, lowest + tile * BLOCK_N, (tile - window_tiles) * BLOCK_N)
    x = begin + tl.arange(0, BLOCK_N)
    here = (x >= low) & (x < high)
    x = x.to(tl.uint32)  # cheaper to divide
    table_ptr = tl.where(of_window, window_table_ptr, entry_table_ptr)
    at = x // WINDOW_N if WINDOW_N == ENTRY_N else tl.where(of_window, x // WINDOW_N, x // ENTRY_N)
    block = tl.load(table_ptr + at, mask=here, other=-1)
    return block, x, here & (block >= 0) & (block < tl.where(of_window, window_blocks, entry_blocks))


@triton.jit(do_not_specialize=SIZES)
def list_rows_kernel(
    window_table_ptr, entry_table_ptr, indices_ptr, lens_ptr, starts_ptr, rows_ptr, positions_ptr, window_stride_r,
    entry_stride_r, stride_k, num_requests, window_blocks, window_capacity, entry_blocks, entry_capacity,
    WINDOW_N: tl.constexpr, ENTRY_N: tl.constexpr, WINDOW: tl.constexpr, ENTRY_WINDOW: tl.constexpr,
    RATIO: tl.constexpr, LISTED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """rows [T, ROWS] int32: all rows of every query; positions [T] int32: theirs, below 0 for padding."""
    token = tl.program_id(0)
    k = tl.program_id(1) * PART + tl.arange(0, PART)
    request, p = position_of(starts_ptr, lens_ptr, token, num_requests)
    window_tiles, _ = tiles_of_query(p, window_capacity, entry_capacity, WINDOW, RATIO, LISTED, BLOCK_N)
    of_window = k < window_tiles * BLOCK_N
    j = tl.maximum(p - WINDOW + 1, 0) + k
    w = k - window_tiles * BLOCK_N
    is_listed = (w >= 0) & (w < LISTED)
    w = tl.load(indices_ptr + token.to(tl.int64) * stride_k + w, mask=is_listed, other=-1)
    is_seen = (w >= 0) & (w < tl.minimum((p + 1) // RATIO, entry_capacity))
    if ENTRY_WINDOW > 0:
        is_seen &= w > p - ENTRY_WINDOW
    here = tl.where(of_window, j < tl.minimum(p + 1, window_capacity), is_seen)
    window_ptrs = window_table_ptr + request.to(tl.int64) * window_stride_r + j // WINDOW_N
    entry_ptrs = entry_table_ptr + request.to(tl.int64) * entry_stride_r + w // ENTRY_N
    block = tl.load(tl.where(of_window, window_ptrs, entry_ptrs), mask=here, other=-1)
    here &= (block >= 0) & (block < tl.where(of_window, window_blocks, entry_blocks))
    row = tl.where(of_window, block * WINDOW_N + j % WINDOW_N, block * ENTRY_N + w % ENTRY_N)
    if tl.program_id(1) == 0:
        tl.store(positions_ptr + token, p)
    tl.store(rows_ptr + token.to(tl.int64) * ROWS + k, tl.where(here, row, -1), mask=k < ROWS)
