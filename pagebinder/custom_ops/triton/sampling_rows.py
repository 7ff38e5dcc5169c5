"""Device functions of sampling on a row of logits: where it lies, what its largest logit is, and what a token counts.

Kernels that use them are compiled without fused multiply-adds: every product and every sum is rounded, as in the
reference (`sampling/sample_tokens.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.triton.values import nearest_integer

BINS = tl.constexpr(16)
NO_KEY = tl.constexpr(0x7FFFFFFF)
MINUS_INFINITY = tl.constexpr(float("-inf"))
FLOAT32_MIN = tl.constexpr(-3.4028234663852886e38)
MASS_BITS = tl.constexpr(30)


@triton.jit
def row_of(x_ptr, rows_ptr, stride, num_rows, draw):
    """(pointer to the row that a draw is from, whether there is such a row)."""
    row = draw.to(tl.int64) if rows_ptr is None else tl.load(rows_ptr + draw)
    is_row = (row >= 0) & (row < num_rows)
    return x_ptr + tl.where(is_row, row, 0) * stride, is_row


@triton.jit
def part_range(vocab, part_tokens):
    begin = tl.program_id(1) * part_tokens
    return begin, tl.minimum(begin + part_tokens, vocab)


@triton.jit
def largest_of_row(largest_ptr, draw, parts, BLOCK_PARTS: tl.constexpr):
    """(largest x, finite where all are -inf; whether the row has a NaN)."""
    part = tl.arange(0, BLOCK_PARTS)
    largest = tl.load(largest_ptr + draw * parts + part, mask=part < parts, other=MINUS_INFINITY)
    has_nan = tl.max((largest != largest).to(tl.int32), 0) > 0
    return tl.maximum(tl.max(tl.where(largest != largest, MINUS_INFINITY, largest), 0), FLOAT32_MIN), has_nan


@triton.jit
def log2_probability(x, largest, scale):
    """y: 0 for the likeliest tokens, also where they are infinite."""
    return tl.where(x == largest, 0.0, (x - largest) * scale)


@triton.jit
def rank_key(y):
    """int32 numbers that rise as y <= 0 falls."""
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def keeps(key, token, cut_key, cut_token):
    return (key < cut_key) | ((key == cut_key) & (token <= cut_token))


@triton.jit
def mass_of(y):
    """2^y in whole units of 2^-30, rounded down, int64."""
    y = tl.maximum(y, -31.0)
    whole = nearest_integer(y)
    f = y - whole
    power = ((whole.to(tl.int32) + (127 + MASS_BITS)) << 23).to(tl.float32, bitcast=True)
    mass = f * 1.53533572e-4 + 1.33988762e-3
    mass = mass * f + 9.61843739e-3
    mass = mass * f + 5.55033247e-2
    mass = mass * f + 2.40226479e-1
    mass = mass * f + 6.93147203e-1
    mass = mass * f + 1.0
    return (mass * power).to(tl.int32).to(tl.int64)
