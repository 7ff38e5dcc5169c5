"""Kernels of sampling that decide by ranks: which tokens top-k and top-p keep.

bins ..., 5, 6 | 7 | 8, ...     the limit lies in bin 7: its tokens are put side by side, in their order, and the
counted, or weighed,            key of the last rank is found bit by bit over them alone; of those with that key
from the likeliest on           the first so many are kept
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.sampling_rows import (
    BINS,
    MINUS_INFINITY,
    NO_KEY,
    keeps,
    largest_of_row,
    log2_probability,
    mass_of,
    part_range,
    rank_key,
    row_of,
)
from pagebinder.custom_ops.triton.values import SIZES


@triton.jit
def bin_of(y):
    return tl.minimum(y * -0.5, BINS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize=SIZES)
def bins_kernel(
    x_ptr, rows_ptr, options_ptr, largest_ptr, count_ptr, mass_ptr, stride, num_rows, vocab, part_tokens,
    CHUNK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    draw, parts = tl.program_id(0), tl.num_programs(1)
    options_ptr += draw * 5
    if (tl.load(options_ptr + 1) >= vocab) & (tl.load(options_ptr + 2) >= 1.0):
        return
    largest, has_nan = largest_of_row(largest_ptr, draw, parts, BLOCK_PARTS)
    if has_nan:
        return
    row_ptr, _ = row_of(x_ptr, rows_ptr, stride, num_rows, draw)
    scale = tl.load(options_ptr).to(tl.float32)
    begin, end = part_range(vocab, part_tokens)
    number = tl.arange(0, BINS)[:, None]
    counts = tl.zeros((BINS, CHUNK), tl.int32)
    masses = tl.zeros((BINS, CHUNK), tl.int64)
    for first in range(begin, end, CHUNK):
        token = first + tl.arange(0, CHUNK)
        x = tl.load(row_ptr + token, mask=token < end, other=MINUS_INFINITY).to(tl.float32)
        y = log2_probability(x, largest, scale)
        is_here = (bin_of(y)[None, :] == number) & (token < end)[None, :]
        counts += is_here.to(tl.int32)
        masses += tl.where(is_here, mass_of(y)[None, :], 0)
    at = (draw * parts + tl.program_id(1)) * BINS + tl.arange(0, BINS)
    tl.store(count_ptr + at, tl.sum(counts, 1).to(tl.int64))
    tl.store(mass_ptr + at, tl.sum(masses, 1))


@triton.jit
def bins_of_row(bins_ptr, draw, parts, BLOCK_PARTS: tl.constexpr):
    """The sums over parts [BINS]."""
    part = tl.arange(0, BLOCK_PARTS)[:, None]
    ptrs = bins_ptr + (draw * parts + part) * BINS + tl.arange(0, BINS)[None, :]
    return tl.sum(tl.load(ptrs, mask=part < parts, other=0), 0)


@triton.jit
def bin_with(sums, needed):
    """(the bin in which the sum from bin 0 on reaches `needed`, the sum before it)."""
    reached = tl.cumsum(sums, 0) >= needed
    here = BINS - tl.sum(reached.to(tl.int32), 0)
    return here, tl.sum(tl.where(tl.arange(0, BINS) < here, sums, 0), 0)


@triton.jit
def collect(
    row_ptr,
    key_ptr,
    here,
    cut_key,
    cut_token,
    largest,
    scale,
    vocab,
    BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Puts the kept tokens of bin `here` side by side, in their order; returns how many there are.

    Each as its key, its number and its weight (mass, or 1), in three arrays of `vocab`.
    """
    tl.debug_barrier()
    num = 0
    for first in range(0, vocab, CHUNK):
        token = first + tl.arange(0, CHUNK)
        x = tl.load(row_ptr + token, mask=token < vocab, other=MINUS_INFINITY).to(tl.float32)
        y = log2_probability(x, largest, scale)
        key = rank_key(y)
        is_here = (token < vocab) & (bin_of(y) == here) & keeps(key, token, cut_key, cut_token)
        at = num + tl.cumsum(is_here.to(tl.int32), 0) - 1
        tl.store(key_ptr + at, key, mask=is_here)
        tl.store(key_ptr + vocab + at, token, mask=is_here)
        weight = mass_of(y) if BY_MASS else tl.full(y.shape, 1, tl.int64)
        tl.store(key_ptr + 2 * vocab + at, weight.to(tl.int32), mask=is_here)
        num += tl.sum(is_here.to(tl.int32), 0)
    tl.debug_barrier()
    return num


@triton.jit
def weight_up_to(key_ptr, vocab, num, last, CHUNK: tl.constexpr):
    """Of the collected tokens whose key is at most `last`."""
    total = tl.zeros((CHUNK,), tl.int64)
    for first in range(0, num, CHUNK):
        number = first + tl.arange(0, CHUNK)
        key = tl.load(key_ptr + number, mask=number < num, other=0)
        total += tl.load(key_ptr + 2 * vocab + number, mask=(number < num) & (key <= last), other=0)
    return tl.sum(total, 0)


@triton.jit
def kept_mass(key_ptr, vocab, num, cut_key, cut_token, CHUNK: tl.constexpr):
    """Of the collected tokens."""
    total = tl.zeros((CHUNK,), tl.int64)
    for first in range(0, num, CHUNK):
        number = first + tl.arange(0, CHUNK)
        key = tl.load(key_ptr + number, mask=number < num, other=0)
        token = tl.load(key_ptr + vocab + number, mask=number < num, other=0)
        is_kept = (number < num) & keeps(key, token, cut_key, cut_token)
        total += tl.where(is_kept, mass_of(0.0 - key.to(tl.float32, bitcast=True)), 0)
    return tl.sum(total, 0)


@triton.jit
def last_rank(key_ptr, vocab, num, needed, CHUNK: tl.constexpr):
    """(key, token) of the rank with which the weight of the collected tokens, in the order of ranks, is `needed`."""
    key = needed.to(tl.int32) * 0
    step = key + (1 << 30)
    for _ in range(31):
        is_enough = weight_up_to(key_ptr, vocab, num, key + (step - 1), CHUNK) >= needed
        key = tl.where(is_enough, key, key + step)
        step = step >> 1
    left = needed - weight_up_to(key_ptr, vocab, num, key - 1, CHUNK)
    chosen = key * 0 + NO_KEY
    for first in range(0, num, CHUNK):
        number = first + tl.arange(0, CHUNK)
        same = (number < num) & (tl.load(key_ptr + number, mask=number < num, other=0) == key)
        weight = tl.load(key_ptr + 2 * vocab + number, mask=same, other=0).to(tl.int64)
        enough = same & (tl.cumsum(weight, 0) >= left)
        token = tl.load(key_ptr + vocab + number, mask=enough, other=NO_KEY)
        chosen = tl.minimum(chosen, tl.min(token, 0))
        left -= tl.sum(weight, 0)
    return key, chosen


@triton.jit(do_not_specialize=SIZES)
def cut_kernel(
    x_ptr, rows_ptr, options_ptr, largest_ptr, sums_ptr, ranks_ptr, cut_ptr, kept_ptr, stride, num_rows, vocab, parts,
    BY_MASS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """First top-k, by tokens, then top-p, BY_MASS, of what that has kept.

    cut [draws, 3] int32: key, token and bin of the last rank. kept [draws] int64: mass that top-k keeps of that bin.
    sums [draws, parts, BINS]: of tokens or of mass. ranks [draws, 3, vocab]: memory for keys, tokens and weights.
    """
    draw = tl.program_id(0)
    cut_ptr += draw * 3
    limit = tl.load(options_ptr + draw * 5 + (2 if BY_MASS else 1))
    is_limited = limit < (1.0 if BY_MASS else vocab)
    largest, has_nan = largest_of_row(largest_ptr, draw, parts, BLOCK_PARTS)
    if BY_MASS:
        cut_key, cut_token, last = tl.load(cut_ptr), tl.load(cut_ptr + 1), tl.load(cut_ptr + 2)
    else:
        cut_key, cut_token, last = NO_KEY, NO_KEY, BINS
        tl.store(cut_ptr, NO_KEY)
        tl.store(cut_ptr + 1, NO_KEY)
        tl.store(cut_ptr + 2, BINS)
    if has_nan | (not is_limited):
        return
    sums = bins_of_row(sums_ptr, draw, parts, BLOCK_PARTS)
    if BY_MASS:
        number = tl.arange(0, BINS)
        of_last = tl.load(kept_ptr + draw, mask=last < BINS, other=0)
        sums = tl.where(number < last, sums, tl.where(number == last, of_last, 0))
        needed = tl.ceil(limit * tl.sum(sums, 0).to(tl.float64)).to(tl.int64)
    else:
        needed = limit.to(tl.int64)
    if needed <= 0:
        return
    row_ptr, _ = row_of(x_ptr, rows_ptr, stride, num_rows, draw)
    scale = tl.load(options_ptr + draw * 5).to(tl.float32)
    here, before = bin_with(sums, needed)
    key_ptr = ranks_ptr + draw.to(tl.int64) * 3 * vocab
    num = collect(row_ptr, key_ptr, here, cut_key, cut_token, largest, scale, vocab, BY_MASS, CHUNK)
    key, token = last_rank(key_ptr, vocab, num, needed - before, CHUNK)
    tl.store(cut_ptr, key)
    tl.store(cut_ptr + 1, token)
    tl.store(cut_ptr + 2, here)
    if not BY_MASS:
        tl.store(kept_ptr + draw, kept_mass(key_ptr, vocab, num, key, token, CHUNK))
