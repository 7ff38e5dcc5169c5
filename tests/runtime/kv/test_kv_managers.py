"""Managers of attention over the decoder's own tokens: hits, counts, blocks behind a window, copies on write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebinder.runtime.kv import (
    MANAGERS,
    BlockCopy,
    BlockPool,
    CacheContext,
    ChunkedLocalManager,
    ChunkedLocalSpec,
    CompressedLatentSpec,
    CrossAttentionManager,
    CrossAttentionSpec,
    FullAttentionManager,
    FullAttentionSpec,
    GroupPrefix,
    KVCacheIntegrityError,
    LatentSpec,
    RecurrentManager,
    RecurrentSpec,
    RingManager,
    RingSpec,
    ShortConvSpec,
    SlidingWindowLatentSpec,
    SlidingWindowManager,
    SlidingWindowSpec,
    make_manager,
)
from pagebinder.runtime.kv.retention import Boundaries
from pagebinder.runtime.request import Request

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
HASHES = [bytes([i]) * 32 for i in range(64)]
NOTHING = GroupPrefix()


def full(block_size=2):
    return FullAttentionSpec(block_size=block_size, **DIMS)


def window(tokens, block_size=2):
    return SlidingWindowSpec(block_size=block_size, window=tokens, **DIMS)


def chunked(tokens, block_size=2):
    return ChunkedLocalSpec(block_size=block_size, chunk=tokens, **DIMS)


def manager(spec, num_blocks=33, *, unit=None, alignment=None, max_model_len=64, max_in_flight_tokens=64):
    unit = unit or spec.block_size
    context = CacheContext(
        pool=BlockPool(num_blocks), max_model_len=max_model_len, max_in_flight_tokens=max_in_flight_tokens,
        hash_block_size=unit, alignment=alignment or unit,
    )  # fmt: skip
    return make_manager(spec, context, 0)


def request(name="a", num_tokens=64):
    new = Request(name, list(range(num_tokens)), max_tokens=1)
    new.block_hashes = HASHES
    return new


def start(m, name, num_tokens, prefix=NOTHING, **options):
    m.context.rows.assign(name)
    m.context.boundaries[name] = Boundaries((), m.context.alignment)
    m.start(name, prefix, **options)
    m.grow(name, prefix.num_tokens, num_tokens)
    return m.tables[name]


def ids(m, name="a"):
    return m.block_ids(name).tolist()


def free_ids(m):
    return [b.block_id for b in m.pool.free_queue.get_all_free_blocks()]


def cache(m, indices):
    """Cache one free block for each logical block in `indices`."""
    per_block = m.hashes_per_block
    for i in indices:
        (block,) = m.pool.get_new_blocks(1)
        table = [m.pool.null_block] * i + [block]
        m.pool.cache_full_blocks(table, HASHES, i, i + 1, m.group_id, hashes_per_block=per_block)
        m.pool.free_blocks([block])


def cache_units(m, index, num_units):
    """Cache a free block that holds the first units of logical block `index`."""
    (block,) = m.pool.get_new_blocks(1)
    first = index * m.hashes_per_block
    m.pool.cache_partial_block(block, HASHES[first : first + num_units], m.group_id, None)
    m.pool.free_blocks([block])
    return block


def hit_pattern(m, max_length):
    hit = m.find_longest_hit(HASHES, max_length, [m.group_id])
    assert len(hit.blocks[0]) == hit.num_tokens // m.block_size
    whole = "".join("." if block.is_null else "x" for block in hit.blocks[0])
    return whole + ("+" if hit.tails[0] is not None else "")


def prefix_of(m, max_length):
    hit = m.find_longest_hit(HASHES, max_length, [m.group_id])
    return GroupPrefix(hit.num_tokens, hit.blocks[0], hit.tails[0])


def test_managers_are_chosen_by_spec_class():
    assert {cls: MANAGERS[cls] for cls in MANAGERS} == {
        FullAttentionSpec: FullAttentionManager,
        LatentSpec: FullAttentionManager,
        CompressedLatentSpec: FullAttentionManager,
        SlidingWindowSpec: SlidingWindowManager,
        SlidingWindowLatentSpec: SlidingWindowManager,
        ChunkedLocalSpec: ChunkedLocalManager,
        CrossAttentionSpec: CrossAttentionManager,
        RecurrentSpec: RecurrentManager,
        ShortConvSpec: RecurrentManager,
        RingSpec: RingManager,
    }
    assert type(manager(window(5))) is SlidingWindowManager


# Hits


def test_full_hit_stops_at_the_first_miss_and_at_alignment():
    m = manager(full())
    cache(m, [0, 1, 2, 4])
    assert hit_pattern(m, 20) == "xxx"
    assert hit_pattern(m, 5) == "xx"
    aligned = manager(full(), alignment=4)
    cache(aligned, [0, 1, 2, 4])
    assert hit_pattern(aligned, 20) == "xx"


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
        ([2, 3, 4], 20, 4, "..xx"),  # a hit may only end at a multiple of 4 tokens
        ([0, 1, 2], 20, 4, "xx"),
    ],
)
def test_window_hits_are_searched_right_to_left_and_null_padded(cached, max_length, alignment, pattern):
    m = manager(window(5), alignment=alignment)
    cache(m, cached)
    assert hit_pattern(m, max_length) == pattern


@given(
    st.sets(st.integers(0, 11)), st.integers(2, 12), st.integers(0, 24), st.sampled_from([2, 4, 6]),
)  # fmt: skip
def test_window_hit_is_the_longest_resumable_prefix(cached, width, max_length, alignment):
    m = manager(window(width), alignment=alignment)
    cache(m, cached)
    lengths = [
        n
        for n in range(0, max_length + 1, 2)
        if n % alignment == 0 and all(i in cached for i in range(max(0, n - width + 1) // 2, n // 2))
    ]
    pattern = hit_pattern(m, max_length)
    assert len(pattern) * 2 == max(lengths)
    first_needed = max(0, len(pattern) * 2 - width + 1) // 2
    assert pattern[:first_needed].strip(".") == "" and "." not in pattern[first_needed:]


@pytest.mark.parametrize(
    ("chunk", "cached", "max_length", "pattern"),
    [
        (3, [3], 11, ".."),  # 11 tokens would need block 2, but 9 end at a chunk's end: nothing is needed
        (3, [2], 11, "..+"),  # after 11 tokens 9 and 10 are seen, in block 2
        (3, [2], 13, "..."),  # 13 would need token 12; 12 is a boundary
        (3, [3], 13, "...+"),
        (3, [], 8, "."),  # 6 tokens: a boundary inside block 1
        (3, [], 2, ""),
        (6, [1, 2], 11, ".x+"),  # 6 .. 10
        (6, [2], 11, "."),  # 6
        (6, [0], 4, "x"),
    ],
)
def test_chunked_hits_need_the_chunk_only(chunk, cached, max_length, pattern):
    m = manager(chunked(chunk, block_size=4), unit=1)
    cache(m, cached)
    assert hit_pattern(m, max_length) == pattern


def test_a_chunk_whose_boundary_is_a_block_boundary_is_resumed_without_blocks():
    m = manager(chunked(8, block_size=4))
    assert hit_pattern(m, 19) == "...."  # 16 tokens
    table = start(m, "a", 20, prefix_of(m, 19))
    assert ids(m) == [0, 0, 0, 0, 1] and table.begins_inside == -1


def test_a_block_that_a_request_started_inside_is_never_cached():
    m = manager(chunked(6, block_size=4), unit=2)
    prefix = prefix_of(m, 7)
    assert (prefix.num_tokens, len(prefix.blocks), prefix.tail) == (6, 1, None)
    table = start(m, "a", 12, prefix)
    assert table.begins_inside == 1
    m.cache_blocks(request(), 12)
    # Block 1 holds tokens 6 and 7, but not 4 and 5.
    assert [b.block_hash is not None for b in table.blocks] == [False, False, True]
    m.cache_end(request(), 8)
    assert table.blocks[1].block_hash is None


def test_hits_in_several_groups_must_be_in_all_of_them():
    m = manager(full())
    cache(m, [0, 1])
    (other,) = m.pool.get_new_blocks(1)
    m.pool.cache_full_blocks([other], HASHES, 0, 1, group_id=1)
    hit = m.find_longest_hit(HASHES, 20, [0, 1])
    assert [len(blocks) for blocks in hit.blocks] == [1, 1] and hit.blocks[1] == [other]


def test_coarse_blocks_are_found_at_their_end_and_at_each_unit_inside():
    m = manager(full(block_size=4), unit=2)
    table = start(m, "a", 8)
    m.cache_blocks(request(), 8)
    for unit, block in enumerate([0, 0, 1, 1]):
        assert m.pool.get_cached_block(HASHES[unit], [0]) == [table.blocks[block]]
    assert [hit_pattern(m, n) for n in (20, 7, 5, 3, 1)] == ["xx", "x+", "x", "+", ""]
    window_of_4 = manager(window(4, block_size=4), unit=2)
    cache(window_of_4, [0, 1])
    assert [hit_pattern(window_of_4, n) for n in (8, 7, 5, 3)] == [".x", "x+", "x", "+"]


# Allocation


def test_allocation_counts_only_what_is_missing():
    m = manager(full())
    assert m.num_blocks_to_start(request(), GroupPrefix(), 5) == 3
    start(m, "a", 5)
    view = m.block_ids("a")
    assert view.tolist() == [1, 2, 3]
    assert m.num_blocks_to_grow("a", 5, 6) == 0
    m.grow("a", 5, 6)
    assert ids(m) == [1, 2, 3]
    assert m.num_blocks_to_grow("a", 6, 7) == 1
    m.grow("a", 6, 7)
    assert ids(m) == [1, 2, 3, 4] and m.covered_tokens("a") == 8
    assert m.array.data[0, :5].tolist() == [1, 2, 3, 4, 0], "the row is what the graph reads"


def test_free_hit_blocks_count_as_needed_referenced_ones_do_not():
    m = manager(full())
    cache(m, [0, 1])
    prefix = prefix_of(m, 4)
    assert m.num_blocks_to_start(request(), prefix, 7) == 2 + 2
    m.pool.touch(prefix.blocks[:1])
    assert m.num_blocks_to_start(request(), prefix, 7) == 2 + 1
    start(m, "a", 4, prefix)
    assert [block.ref_cnt for block in prefix.blocks] == [2, 1]
    assert m.num_blocks_to_grow("a", 4, 7) == 2


def test_admission_cap_bounds_a_long_prompt_by_what_its_window_holds():
    m = manager(window(5), max_in_flight_tokens=2)
    assert (
        m.max_blocks == 4
    )  # 4 tokens before and 2 in flight are 3 blocks, and the window may start mid-block
    assert m.num_blocks_to_start(request(), GroupPrefix(), 40) == 20
    assert m.num_blocks_to_start(request(), GroupPrefix(), 40, capped=True) == 4
    assert m.num_blocks_to_start(request(), GroupPrefix(), 3, capped=True) == 2
    assert m.max_admission_blocks(3) == 2 and m.max_admission_blocks(1000) == 4
    cache(m, [3, 4])
    # Of 4 at most at any time, 2 are the hit's own: they are free now and leave the queue, too.
    assert m.num_blocks_to_start(request(), prefix_of(m, 10), 40, capped=True) == 2 + 2


@pytest.mark.parametrize(
    ("spec", "skipped"),
    [
        (full(), {0: 0, 20: 0}),
        (window(5), {0: 0, 4: 0, 5: 1, 6: 2, 20: 16}),  # position 5 sees 1..5
        (window(1), {0: 0, 1: 1, 7: 7}),
        (chunked(6), {0: 0, 5: 0, 6: 6, 11: 6, 12: 12}),
    ],
)
def test_skipped_tokens(spec, skipped):
    m = manager(spec)
    assert {n: m.get_num_skipped_tokens(n) for n in skipped} == skipped


def test_blocks_behind_the_window_are_given_back():
    m = manager(window(5), num_blocks=8)
    start(m, "a", 12)
    m.remove_skipped_blocks("a", 9)  # position 9 sees 5..9: tokens 0..4 are skipped, blocks 0 and 1 whole
    assert ids(m) == [0, 0, 3, 4, 5, 6]
    assert free_ids(m) == [2, 1, 7]
    m.remove_skipped_blocks("a", 9)
    m.check_integrity()
    m.pool.check_integrity({3: 1, 4: 1, 5: 1, 6: 1})
    m.remove_skipped_blocks("a", 100)
    assert ids(m) == [0] * 6
    m.free("a")
    assert m.pool.num_free_blocks == 7


def test_a_block_that_two_chunks_share_stays_until_the_second_is_over():
    m = manager(chunked(6, block_size=4))
    start(m, "a", 16)
    m.remove_skipped_blocks("a", 7)  # the chunk of position 7 began at 6, inside block 1
    assert ids(m) == [0, 2, 3, 4]
    m.remove_skipped_blocks("a", 12)
    assert ids(m) == [0, 0, 0, 4]


def test_hashed_blocks_behind_the_window_stay_reusable():
    m = manager(window(3), num_blocks=8)
    start(m, "a", 8)
    m.cache_blocks(request(), 8)
    m.remove_skipped_blocks("a", 8)
    assert ids(m) == [0, 0, 0, 4]
    m.free("a")
    m.context.rows.release("a")
    assert hit_pattern(m, 4) == ".x"
    # A block that was given back un-hashed is not cached later.
    table = start(m, "b", 8)
    m.remove_skipped_blocks("b", 6)
    other = request("b")
    other.block_hashes = HASHES[8:]
    m.cache_blocks(other, 8)
    assert table.blocks[1].is_null and table.blocks[0].block_hash is None


def test_a_table_starts_null_padded_from_a_window_hit():
    m = manager(window(5))
    cache(m, [3, 4])
    start(m, "a", 12, prefix_of(m, 20))
    assert ids(m)[:3] == [0, 0, 0] and all(ids(m)[3:]) and len(ids(m)) == 6
    m.cache_blocks(request(), 12)
    m.check_integrity()
    m.free("a")
    m.pool.check_integrity({})


def test_freeing_evicts_the_tail_of_a_prefix_first():
    m = manager(full(), num_blocks=5)
    start(m, "a", 8)
    m.cache_blocks(request(), 8)
    m.free("a")
    m.free("a")
    assert free_ids(m) == [4, 3, 2, 1]
    start(m, "b", 4)
    assert hit_pattern(m, 20) == "xx"


# Partly filled blocks and copy on write


def test_a_tail_that_others_use_is_copied():
    m = manager(full(block_size=4), unit=2, num_blocks=6)
    cache(m, [0])
    prefix = prefix_of(m, 3)
    (source,) = m.pool.get_cached_block(HASHES[0], [0])
    assert prefix.tail is source and prefix.num_tokens == 2
    m.pool.touch([source])
    assert (m.num_blocks_to_start(request(), prefix, 4), m.num_blocks_to_copy(prefix)) == (1, 0)
    start(m, "a", 4, prefix)
    assert m.context.copies.take_copies() == [BlockCopy(source.block_id, ids(m)[0])]
    assert source.ref_cnt == 2, "held until the copy was made"
    m.fence.step_finished(m.fence.step_started())
    assert source.ref_cnt == 1 and source.block_hash is not None


def test_a_free_tail_is_copied_if_it_holds_more_and_there_is_room():
    m = manager(full(block_size=4), unit=2, num_blocks=6)
    cache(m, [0])
    prefix = prefix_of(m, 3)
    assert (m.num_blocks_to_start(request(), prefix, 4), m.num_blocks_to_copy(prefix)) == (1, 1)
    start(m, "a", 4, prefix)
    assert ids(m) != [prefix.tail.block_id] and m.pool.num_free_blocks == 3
    assert len(m.context.copies.take_copies()) == 1
    m.fence.step_finished(m.fence.step_started())
    assert m.pool.num_free_blocks == 4
    assert hit_pattern(m, 4) == "x"


def test_a_free_tail_is_taken_over_if_there_is_no_room_for_a_copy():
    m = manager(full(block_size=4), unit=2)
    cache(m, [0])
    prefix = prefix_of(m, 3)
    start(m, "a", 4, prefix, may_copy=False)
    assert ids(m) == [prefix.tail.block_id] and m.context.copies.take_copies() == []
    assert hit_pattern(m, 4) == "", "its other contents are about to be overwritten"


def test_a_free_tail_that_holds_no_more_than_the_hit_is_continued():
    m = manager(full(block_size=4), unit=2)
    block = cache_units(m, 0, 1)
    prefix = prefix_of(m, 3)
    assert m.num_blocks_to_copy(prefix) == 0
    start(m, "a", 4, prefix)
    assert ids(m) == [block.block_id] and m.context.copies.take_copies() == []
    assert hit_pattern(m, 3) == "+", "what was cached stays as it is"
    m.cache_blocks(request(), 4)
    assert hit_pattern(m, 4) == "x"


def test_a_fork_copies_the_block_of_whoever_writes_first():
    m = manager(full(block_size=4))
    start(m, "a", 6)
    m.context.rows.assign("b")
    m.share("a", "b", 6)
    assert ids(m, "b") == ids(m) == [1, 2] and m.pool.blocks[2].ref_cnt == 2
    assert m.num_blocks_to_grow("b", 6, 7) == 1
    m.grow("b", 6, 7)
    assert (ids(m), ids(m, "b")) == ([1, 2], [1, 3])
    assert m.context.copies.take_copies() == [BlockCopy(2, 3)]
    # The copy still holds block 2, but "a" is its only user now.
    assert m.pool.blocks[2].ref_cnt == 2 and m.num_blocks_to_grow("a", 6, 7) == 0
    m.check_integrity()


def test_a_fork_at_a_block_boundary_copies_nothing_and_shares_no_block_of_later_tokens():
    m = manager(full(block_size=4))
    start(m, "a", 12)
    m.context.rows.assign("b")
    m.share("a", "b", 8)
    assert ids(m, "b") == [1, 2]
    m.grow("b", 8, 9)
    assert ids(m, "b") == [1, 2, 4] and m.context.copies.take_copies() == []


def test_the_end_of_a_request_is_cached_in_units_and_promoted_when_the_block_is_full():
    m = manager(full(block_size=4), unit=1)
    table = start(m, "a", 7)
    m.cache_end(request(), 7)
    assert hit_pattern(m, 20) == "x+" and len(table.blocks[1].inner_hashes) == 2
    m.cache_end(request(), 8)
    assert hit_pattern(m, 20) == "xx" and len(table.blocks[1].inner_hashes) == 3
    assert table.blocks[1].block_hash[:32] == HASHES[7]
    m.pool.check_integrity({1: 1, 2: 1})
    m.pool.evict_blocks([2])
    assert hit_pattern(m, 20) == "x"
    m.pool.check_integrity({1: 1, 2: 1})


def test_integrity_check_sees_a_wrong_table():
    m = manager(full())
    table = start(m, "a", 4)
    m.block_ids("a")[0] = 9
    with pytest.raises(KVCacheIntegrityError, match="differs"):
        m.check_integrity()
    table.put(0, table.blocks[0])
    table.row[2] = 5
    with pytest.raises(KVCacheIntegrityError, match="goes on"):
        m.check_integrity()
