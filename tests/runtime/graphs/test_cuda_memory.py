"""Segments of torch's allocator, by its rules: no GPU is needed to count them."""

from __future__ import annotations

import random

import pytest

from pagebinder.runtime.graphs.cuda_memory import SegmentPool

MIB = 1 << 20


@pytest.mark.parametrize(
    ("blocks", "segments"),
    [
        ([1], 2 * MIB),
        ([MIB], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 3 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB + 1], 12 * MIB),
        ([0, 0], 0),
    ],
)
def test_segments_of_blocks_that_stay(blocks, segments):
    pool = SegmentPool()
    for num_bytes in blocks:
        pool.take(num_bytes)
    assert pool.num_bytes == segments


def test_blocks_that_were_given_back_are_one_again():
    pool = SegmentPool()
    thirds = [pool.take(6 * MIB) for _ in range(3)]
    for block in (thirds[0], thirds[2], thirds[1]):
        pool.give_back(block)
    pool.take(9 * MIB)
    assert pool.num_bytes == 20 * MIB


def test_a_hole_serves_what_fits_best():
    pool = SegmentPool()
    blocks = [pool.take(n * MIB) for n in (4, 2, 6, 2, 4)]
    pool.give_back(blocks[0]), pool.give_back(blocks[2])
    pool.take(4 * MIB)  # the first hole, and leaves the larger one
    pool.take(6 * MIB)
    assert pool.num_bytes == 20 * MIB


def test_nothing_is_lost_in_any_order():
    pool, draw, held, used = SegmentPool(), random.Random(0), [], 0
    for _ in range(2000):
        if held and draw.random() < 0.5:
            block, size = held.pop(draw.randrange(len(held)))
            pool.give_back(block)
            used -= size
        else:
            size = draw.choice((300, 5000, 600_000, 3 * MIB, 8 * MIB, 15 * MIB))
            held.append((pool.take(size), size))
            used += size
        assert used <= pool.num_bytes
    most = pool.num_bytes
    for block, _ in held:
        pool.give_back(block)
    for block in [pool.take(20 * MIB) for _ in range(4)]:  # whole segments are there again
        pool.give_back(block)
    assert pool.num_bytes == most
