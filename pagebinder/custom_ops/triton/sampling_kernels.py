"""Kernels of sampling: rows of logits in parts, a part a program; only what ranks decide takes a program per draw.

    penalise_kernel   [draws, parts]   logits -> x, float32, penalised; only if there are seen tokens
    largest_kernel    [draws, parts]   the largest x of a part and its first token; NaN where x has one
    bins_kernel       [draws, parts]   tokens and mass by bins of y, 2 bits wide; left at once without top-k and top-p
    cut_kernel        [draws]          the last rank that top-k keeps, then that top-p does; see `sampling_cut`
    draw_kernel       [draws, parts]   the best score of a part and its token
    choose_kernel     [draws]          the best of the parts

A row that is not in the logits counts as one of NaN; the host does not look at what only the device knows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.sampling_noise import log2_noise
from pagebinder.custom_ops.triton.sampling_rows import (
    MINUS_INFINITY,
    NO_KEY,
    keeps,
    largest_of_row,
    log2_probability,
    part_range,
    rank_key,
    row_of,
)
from pagebinder.custom_ops.triton.values import SIZES


@triton.jit(do_not_specialize=SIZES)
def penalise_kernel(
    logits_ptr, rows_ptr, options_ptr, seen_ptr, starts_ptr, x_ptr, stride, num_rows, num_seen, vocab, part_tokens,
    CHUNK: tl.constexpr,
):  # fmt: skip
    draw = tl.program_id(0)
    row_ptr, is_row = row_of(logits_ptr, rows_ptr, stride, num_rows, draw)
    out_ptr = x_ptr + draw.to(tl.int64) * vocab
    begin, end = part_range(vocab, part_tokens)
    for first in range(begin, end, CHUNK):
        token = first + tl.arange(0, CHUNK)
        mask = (token < end) & is_row
        x = tl.load(row_ptr + token, mask=mask, other=float("nan")).to(tl.float32)
        tl.store(out_ptr + token, x, mask=token < end)
    tl.debug_barrier()
    penalty = tl.load(options_ptr + draw * 5 + 4).to(tl.float32)
    stop = tl.minimum(tl.load(starts_ptr + draw + 1), num_seen).to(tl.int32)
    if is_row:
        for first in range(tl.maximum(tl.load(starts_ptr + draw), 0).to(tl.int32), stop, CHUNK):
            number = first + tl.arange(0, CHUNK)
            token = tl.load(seen_ptr + number, mask=number < stop, other=-1)
            mask = (token >= begin) & (token < end)
            # From the logits, not from x: a token that is there twice is penalised once.
            x = tl.load(row_ptr + token, mask=mask, other=0).to(tl.float32)
            x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + penalty), x * penalty)
            tl.store(out_ptr + token, x, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def largest_kernel(
    x_ptr, rows_ptr, largest_ptr, token_ptr, stride, num_rows, vocab, part_tokens, CHUNK: tl.constexpr
):
    draw = tl.program_id(0)
    row_ptr, is_row = row_of(x_ptr, rows_ptr, stride, num_rows, draw)
    begin, end = part_range(vocab, part_tokens)
    largest = MINUS_INFINITY
    chosen = NO_KEY
    nans = 0
    for first in range(begin, end, CHUNK):
        token = first + tl.arange(0, CHUNK)
        x = tl.load(row_ptr + token, mask=token < end, other=MINUS_INFINITY).to(tl.float32)
        is_nan = x != x
        nans += tl.sum(is_nan.to(tl.int32), 0)
        x = tl.where(is_nan, MINUS_INFINITY, x)
        here = tl.max(x, 0)
        found = tl.min(tl.where(x == here, token, NO_KEY), 0)
        chosen = tl.where(here > largest, found, chosen)
        largest = tl.maximum(largest, here)
    at = draw * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest_ptr + at, tl.where((nans > 0) | (not is_row), float("nan"), largest))
    if token_ptr is not None:
        tl.store(token_ptr + at, chosen)


@triton.jit(do_not_specialize=SIZES)
def draw_kernel(
    x_ptr, rows_ptr, streams_ptr, options_ptr, largest_ptr, cut_ptr, score_ptr, chosen_ptr, stride,
    num_rows, vocab, part_tokens, COUNTERS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """A counter's words belong to tokens 16 apart; parts begin at multiples of 64 tokens, 16 counters."""
    draw, parts = tl.program_id(0), tl.num_programs(1)
    row_ptr, _ = row_of(x_ptr, rows_ptr, stride, num_rows, draw)
    largest, has_nan = largest_of_row(largest_ptr, draw, parts, BLOCK_PARTS)
    scale = tl.load(options_ptr + draw * 5).to(tl.float32)
    min_y = tl.load(options_ptr + draw * 5 + 3).to(tl.float32)
    cut_key, cut_token = tl.load(cut_ptr + draw * 3), tl.load(cut_ptr + draw * 3 + 1)
    seed, position = tl.load(streams_ptr + 2 * draw), tl.load(streams_ptr + 2 * draw + 1)
    begin, end = part_range(vocab, part_tokens)
    best = float("-inf")
    chosen = NO_KEY
    for first in range(begin, end, COUNTERS * 4):
        counter = first // 4 + tl.arange(0, COUNTERS)
        token = (counter // 16 * 64 + counter % 16)[:, None] + 16 * tl.arange(0, 4)[None, :]
        x = tl.load(row_ptr + token, mask=token < end, other=MINUS_INFINITY).to(tl.float32)
        y = log2_probability(x, largest, scale)
        kept = (token < end) & (y >= min_y) & keeps(rank_key(y), token, cut_key, cut_token)
        if tl.max(tl.max(kept.to(tl.int32), 1), 0) > 0:
            c0 = counter.to(tl.uint32)
            zero = tl.zeros_like(c0)
            k0, k1 = zero + seed.to(tl.uint32), zero + (seed >> 32).to(tl.uint32)
            w0, w1, w2, w3 = tl.philox_impl(c0, zero + position.to(tl.uint32), zero, zero, k0, k1)
            words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (COUNTERS, 4))
            score = tl.where(kept, y - log2_noise(words), MINUS_INFINITY)
            here = tl.max(tl.max(score, 1), 0)
            found = tl.min(tl.min(tl.where(score == here, token, NO_KEY), 1), 0)
            chosen = tl.where(here > best, found, chosen)
            best = tl.maximum(best, here)
    at = draw * parts + tl.program_id(1)
    tl.store(score_ptr + at, tl.where(has_nan, float("nan"), best))
    tl.store(chosen_ptr + at, chosen)


@triton.jit(do_not_specialize=SIZES)
def choose_kernel(score_ptr, chosen_ptr, out_ptr, parts, BLOCK_PARTS: tl.constexpr):
    """The first of the best tokens; -1 where a score is NaN, 0 where all are -inf."""
    draw, part = tl.program_id(0), tl.arange(0, BLOCK_PARTS)
    score = tl.load(score_ptr + draw * parts + part, mask=part < parts, other=MINUS_INFINITY)
    token = tl.load(chosen_ptr + draw * parts + part, mask=part < parts, other=NO_KEY)
    best = tl.max(tl.where(score != score, MINUS_INFINITY, score), 0)
    first = tl.min(tl.where(score == best, token, NO_KEY), 0)
    first = tl.where(best == MINUS_INFINITY, 0, first)
    has_nan = tl.max((score != score).to(tl.int32), 0) > 0
    tl.store(out_ptr + draw, tl.where(has_nan, -1, first).to(tl.int64))
