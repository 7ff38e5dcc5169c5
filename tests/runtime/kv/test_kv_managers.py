"""Managers on their own: hits, allocation counts, blocks behind the window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebinder.runtime.kv import (
    MANAGERS,
    BlockPool,
    FullAttentionManager,
    FullAttentionSpec,
    KVCacheIntegrityError,
    SlidingWindowManager,
    SlidingWindowSpec,
    make_manager,
)

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
HASHES = [bytes([i]) * 32 for i in range(32)]


def full(block_size=2):
    return FullAttentionSpec(block_size=block_size, **DIMS)


def window(tokens, block_size=2):
    return SlidingWindowSpec(block_size=block_size, window=tokens, **DIMS)


def manager(spec, num_blocks=33, max_blocks=32, hash_block_size=None):
    return make_manager(
        spec, BlockPool(num_blocks), 0, hash_block_size=hash_block_size or spec.block_size,
        max_blocks=max_blocks,
    )  # fmt: skip


def cache(m, indices):
    """Cache one free block for each logical block in `indices`."""
    for i in indices:
        (block,) = m.pool.get_new_blocks(1)
        m.pool.cache_full_blocks([m.pool.null_block] * i + [block], HASHES, i, i + 1, m.group_id)
        m.pool.free_blocks([block])


def hit_pattern(m, max_length, alignment=None):
    (hit,) = m.find_longest_cache_hit(HASHES, max_length, alignment or m.block_size, [m.group_id])
    return "".join("." if block.is_null else "x" for block in hit)


def test_managers_are_chosen_by_spec_class():
    assert MANAGERS[FullAttentionSpec] is FullAttentionManager
    assert type(manager(window(5))) is SlidingWindowManager


def test_full_hit_stops_at_the_first_miss_and_at_alignment():
    m = manager(full())
    cache(m, [0, 1, 2, 4])
    assert hit_pattern(m, 20) == "xxx"
    assert hit_pattern(m, 5) == "xx"
    assert hit_pattern(m, 20, alignment=4) == "xx"


@pytest.mark.parametrize(
    ("cached", "max_length", "alignment", "pattern"),
    [
        ([0, 1, 2, 3, 4], 20, 2, "...xx"),  # W - 1 = 4 tokens = 2 blocks of 2, the rest is null but counts
        ([3, 4], 20, 2, "...xx"),  # nothing before the window is needed
        ([0, 1, 3], 20, 2, "xx"),  # block 3 alone does not cover the window
        ([0], 20, 2, "x"),  # shorter than the window, but it starts the context
        ([1], 20, 2, ""),
        ([], 20, 2, ""),
        ([3, 4], 8, 2, ""),  # max_length cuts block 4 off
        ([2, 3, 4], 20, 4, "..xx"),  # a run may only end at a multiple of 4 tokens
        ([0, 1, 2], 20, 4, "xx"),
    ],
)
def test_window_hits_are_searched_right_to_left_and_null_padded(cached, max_length, alignment, pattern):
    m = manager(window(5))
    cache(m, cached)
    assert hit_pattern(m, max_length, alignment) == pattern


@given(
    st.sets(st.integers(0, 11)), st.integers(2, 12), st.integers(0, 24), st.sampled_from([2, 4, 6]),
)  # fmt: skip
def test_window_hit_is_the_longest_resumable_prefix(cached, width, max_length, alignment):
    m = manager(window(width))
    cache(m, cached)
    lengths = [
        n
        for n in range(0, max_length + 1, 2)
        if n % alignment == 0 and all(i in cached for i in range(max(0, n - width + 1) // 2, n // 2))
    ]
    pattern = hit_pattern(m, max_length, alignment)
    assert len(pattern) * 2 == max(lengths)
    first_needed = max(0, len(pattern) * 2 - width + 1) // 2
    assert pattern[:first_needed].strip(".") == "" and "." not in pattern[first_needed:]


def test_hits_in_several_groups_must_be_in_all_of_them():
    m = manager(full())
    cache(m, [0, 1])
    (other,) = m.pool.get_new_blocks(1)
    m.pool.cache_full_blocks([other], HASHES, 0, 1, group_id=1)
    hits = m.find_longest_cache_hit(HASHES, 20, 2, [0, 1])
    assert [len(hit) for hit in hits] == [1, 1] and hits[1] == [other]


def test_coarse_blocks_are_looked_up_and_cached_under_their_last_hash():
    m = manager(full(block_size=4), hash_block_size=2)
    m.allocate_new_blocks("a", 8)
    m.cache_blocks("a", HASHES[:4], 8)
    assert m.pool.get_cached_block(HASHES[3], [0]) == [m.tables["a"].blocks[1]]
    assert hit_pattern(m, 20) == "xx"


def test_allocation_counts_only_what_is_missing():
    m = manager(full())
    assert m.get_num_blocks_to_allocate("a", 5, [], 0) == 3
    assert [b.block_id for b in m.allocate_new_blocks("a", 5)] == [1, 2, 3]
    assert m.get_num_blocks_to_allocate("a", 6, [], 0) == 0
    assert m.allocate_new_blocks("a", 6) == []
    assert m.get_num_blocks_to_allocate("a", 7, [], 0) == 1
    ids = m.block_ids("a")
    m.allocate_new_blocks("a", 7)
    assert ids == [1, 2, 3, 4], "the list is live"


def test_free_hit_blocks_count_as_needed_referenced_ones_do_not():
    m = manager(full())
    cache(m, [0, 1])
    ((first, second),) = m.find_longest_cache_hit(HASHES, 4, 2, [0])
    assert m.get_num_blocks_to_allocate("a", 7, [first, second], 4) == 2 + 2
    m.pool.touch([first])
    assert m.get_num_blocks_to_allocate("a", 7, [first, second], 4) == 2 + 1
    m.allocate_new_computed_blocks("a", [first, second], 4)
    assert (first.ref_cnt, second.ref_cnt) == (2, 1)
    assert m.get_num_blocks_to_allocate("a", 7, [], 4) == 2


def test_admission_cap_bounds_a_long_prompt_by_what_its_window_holds():
    m = manager(window(5), max_blocks=4)
    assert m.get_num_blocks_to_allocate("a", 40, [], 0) == 20
    assert m.get_num_blocks_to_allocate("a", 40, [], 0, capped=True) == 4
    assert m.get_num_blocks_to_allocate("a", 3, [], 0, capped=True) == 2
    assert m.max_admission_blocks(3) == 2 and m.max_admission_blocks(1000) == 4
    cache(m, [3, 4])
    (hit,) = m.find_longest_cache_hit(HASHES, 10, 2, [0])
    # Of 4 at most at any time, 2 are the hit's own: they are free now and leave the queue, too.
    assert m.get_num_blocks_to_allocate("a", 40, hit, 10, capped=True) == 2 + 2


@pytest.mark.parametrize(
    ("num_computed", "skipped"), [(0, 0), (4, 0), (5, 1), (6, 2), (20, 16)]
)  # window 5: position 5 sees 1..5
def test_skipped_tokens_of_a_window(num_computed, skipped):
    assert manager(window(5)).get_num_skipped_tokens(num_computed) == skipped
    assert manager(full()).get_num_skipped_tokens(num_computed) == 0


def test_blocks_behind_the_window_are_given_back():
    m = manager(window(5), num_blocks=8)
    m.allocate_new_blocks("a", 12)
    m.remove_skipped_blocks("a", 9)  # position 9 sees 5..9: tokens 0..4 are skipped, blocks 0 and 1 whole
    assert m.block_ids("a") == [0, 0, 3, 4, 5, 6]
    assert [b.block_id for b in m.pool.free_queue.get_all_free_blocks()] == [2, 1, 7]
    m.remove_skipped_blocks("a", 9)
    m.check_integrity()
    m.pool.check_integrity({3: 1, 4: 1, 5: 1, 6: 1})
    m.remove_skipped_blocks("a", 100)
    assert m.block_ids("a") == [0] * 6
    m.free("a")
    assert m.pool.num_free_blocks == 7


def test_hashed_blocks_behind_the_window_stay_reusable():
    m = manager(window(3), num_blocks=8)
    m.allocate_new_blocks("a", 8)
    m.cache_blocks("a", HASHES, 8)
    m.remove_skipped_blocks("a", 8)
    assert m.block_ids("a") == [0, 0, 0, 4]
    m.free("a")
    assert hit_pattern(m, 4) == ".x"
    # A block that was given back un-hashed is not cached later.
    m.allocate_new_blocks("b", 8)
    m.remove_skipped_blocks("b", 6)
    m.cache_blocks("b", HASHES[8:], 8)
    assert m.tables["b"].blocks[1].is_null and m.tables["b"].blocks[0].block_hash is None


def test_a_table_starts_null_padded_from_a_window_hit():
    m = manager(window(5))
    cache(m, [3, 4])
    (hit,) = m.find_longest_cache_hit(HASHES, 20, 2, [0])
    m.allocate_new_computed_blocks("a", hit, 10)
    m.allocate_new_blocks("a", 12)
    ids = m.block_ids("a")
    assert ids[:3] == [0, 0, 0] and all(ids[3:]) and len(ids) == 6
    m.cache_blocks("a", HASHES, 12)
    m.check_integrity()
    m.free("a")
    m.pool.check_integrity({})


def test_freeing_evicts_the_tail_of_a_prefix_first():
    m = manager(full(), num_blocks=5)
    m.allocate_new_blocks("a", 8)
    m.cache_blocks("a", HASHES, 8)
    m.free("a")
    m.free("a")
    assert [b.block_id for b in m.pool.free_queue.get_all_free_blocks()] == [4, 3, 2, 1]
    m.allocate_new_blocks("b", 4)
    assert hit_pattern(m, 20) == "xx"


def test_integrity_check_sees_a_wrong_table():
    m = manager(full())
    m.allocate_new_blocks("a", 4)
    m.block_ids("a")[0] = 9
    with pytest.raises(KVCacheIntegrityError, match="differ"):
        m.check_integrity()
