"""Block pool: order of reuse, reference counts, the hash map, events, integrity."""

import time

import pytest

from pagebinder.errors import CacheCapacityError
from pagebinder.runtime.kv import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlocksStored,
    FreeBlockQueue,
    KVCacheBlock,
    KVCacheIntegrityError,
)


def ids(blocks):
    return [block.block_id for block in blocks]


def chain(n, start=0):
    return [bytes([start + i]) * 32 for i in range(n)]


def free_ids(pool):
    return ids(pool.free_queue.get_all_free_blocks())


def test_queue_keeps_order_through_every_operation():
    blocks = [KVCacheBlock(i) for i in range(6)]
    queue = FreeBlockQueue(blocks)
    assert ids(queue.popleft_n(0)) == []
    assert queue.popleft() is blocks[0]
    assert ids(queue.popleft_n(2)) == [1, 2]
    queue.remove(blocks[4])
    assert ids(queue.get_all_free_blocks()) == [3, 5]
    queue.prepend_n([blocks[2], blocks[1]])
    queue.append_n([blocks[4], blocks[0]])
    assert ids(queue.get_all_free_blocks()) == [2, 1, 3, 5, 4, 0]
    assert queue.num_free_blocks == 6
    assert ids(queue.popleft_n(6)) == [2, 1, 3, 5, 4, 0]
    assert queue.get_all_free_blocks() == []
    queue.append(blocks[3])
    assert ids(queue.get_all_free_blocks()) == [3]


def test_queue_refuses_what_it_cannot_do():
    blocks = [KVCacheBlock(i) for i in range(2)]
    queue = FreeBlockQueue(blocks)
    with pytest.raises(ValueError, match="only 2 are free"):
        queue.popleft_n(3)
    queue.popleft_n(2)
    with pytest.raises(ValueError):
        queue.popleft()
    with pytest.raises(RuntimeError, match="not in the free queue"):
        queue.remove(blocks[0])


def test_block_0_is_null_and_never_counted():
    pool = BlockPool(4)
    assert pool.null_block.is_null and pool.null_block.block_id == 0
    assert pool.get_usage() == 0.0
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert pool.get_usage() == 1.0
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    assert pool.null_block.ref_cnt == 0
    with pytest.raises(ValueError):
        pool.get_new_blocks(1)
    pool.check_integrity({1: 1, 2: 1, 3: 1})
    with pytest.raises(CacheCapacityError):
        BlockPool(1)


def test_unhashed_blocks_go_to_the_front_hashed_ones_to_the_back():
    pool = BlockPool(8)
    table = pool.get_new_blocks(4)
    pool.cache_full_blocks(table, chain(2), 0, 2, group_id=0)
    pool.free_blocks(reversed(table))
    # Un-hashed 4 and 3 first (last in, first out), then never used, then the hashed tail before its head.
    assert free_ids(pool) == [4, 3, 5, 6, 7, 2, 1]
    pool.check_integrity({})


def test_without_caching_every_freed_block_goes_to_the_front():
    pool = BlockPool(6, enable_caching=False)
    table = pool.get_new_blocks(2)
    pool.cache_full_blocks(table, chain(2), 0, 2, group_id=0)
    assert pool.get_cached_block(chain(1)[0], [0]) is None
    pool.free_blocks(reversed(table))
    assert free_ids(pool) == [2, 1, 3, 4, 5]


def test_a_shared_block_is_free_only_after_its_last_user():
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    pool.free_blocks([block])
    assert block.ref_cnt == 1 and pool.num_free_blocks == 2
    pool.free_blocks([block])
    assert pool.num_free_blocks == 3
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free_blocks([block])


def test_touch_revives_a_free_block_from_the_middle_of_the_queue():
    pool = BlockPool(5)
    table = pool.get_new_blocks(3)
    hashes = chain(3)
    pool.cache_full_blocks(table, hashes, 0, 3, group_id=0)
    pool.free_blocks(reversed(table))
    assert free_ids(pool) == [4, 3, 2, 1]
    (hit,) = pool.get_cached_block(hashes[1], [0])
    pool.touch([hit])
    assert hit is table[1] and free_ids(pool) == [4, 3, 1]
    assert ids(pool.get_new_blocks(2)) == [4, 3]
    assert pool.get_cached_block(hashes[2], [0]) is None, "allocation evicts"
    assert pool.get_cached_block(hashes[1], [0]) == [hit]


def test_duplicates_stay_and_the_first_inserted_serves():
    pool = BlockPool(5)
    first, second, third = pool.get_new_blocks(3)
    for block in (first, second, third):
        pool.cache_full_blocks([block], chain(1), 0, 1, group_id=0)
    assert pool.get_cached_block(chain(1)[0], [0]) == [first]
    pool.evict_blocks([first.block_id])
    assert pool.get_cached_block(chain(1)[0], [0]) == [second]
    assert first.ref_cnt == 1, "evicting forgets contents, it does not free"
    pool.check_integrity({1: 1, 2: 1, 3: 1})
    pool.evict_blocks([2, 3])
    assert pool.get_cached_block(chain(1)[0], [0]) is None
    pool.check_integrity()


def test_a_hit_needs_every_group():
    pool = BlockPool(5)
    a, b = pool.get_new_blocks(2)
    pool.cache_full_blocks([a], chain(1), 0, 1, group_id=0)
    assert pool.get_cached_block(chain(1)[0], [0, 1]) is None
    pool.cache_full_blocks([b], chain(1), 0, 1, group_id=1)
    assert pool.get_cached_block(chain(1)[0], [0, 1]) == [a, b]


def test_coarse_blocks_use_the_last_hash_they_cover_and_masks_and_nulls_are_left_out():
    pool = BlockPool(8)
    hashes = chain(8)
    table = [pool.null_block, *pool.get_new_blocks(3)]
    pool.cache_full_blocks(table, hashes, 0, 4, 0, hashes_per_block=2, mask=[True, True, False, True])
    found = [pool.get_cached_block(hashes[i], [0]) for i in range(8)]
    assert found == [None, None, [table[1]], [table[1]], None, None, [table[3]], [table[3]]]
    pool.cache_full_blocks(
        table, hashes, 1, 2, 0, hashes_per_block=2
    )  # a fork stores the same contents again
    with pytest.raises(AssertionError, match="already has a hash"):
        pool.cache_full_blocks(table, chain(8, start=100), 1, 2, 0, hashes_per_block=2)


def test_units_inside_a_block_are_found_completed_and_evicted_with_it():
    pool, hashes, events = BlockPool(4), chain(8), []
    pool.observers.append(events.append)
    table = pool.get_new_blocks(2)
    pool.cache_partial_block(table[0], hashes[:2], 0, None)
    assert [pool.get_cached_block(h, [0]) for h in hashes[:3]] == [[table[0]], [table[0]], None]
    pool.cache_full_blocks(table, hashes, 0, 2, 0, hashes_per_block=4)
    assert [pool.get_cached_block(h, [0]) for h in hashes] == [[table[0]]] * 4 + [[table[1]]] * 4
    pool.check_integrity({1: 1, 2: 1})
    pool.free_blocks(reversed(table))
    assert free_ids(pool) == [3, 2, 1], "found by a part counts as hashed"
    pool.get_new_blocks(2)
    assert [pool.get_cached_block(h, [0]) for h in hashes] == [[table[0]]] * 4 + [None] * 4
    assert events == [
        BlocksStored(0, (1,), (hashes[1],), None),
        BlocksStored(0, (1, 2), (hashes[3], hashes[7]), None),
        BlockRemoved(0, 2, hashes[7]),
    ]
    pool.free_blocks([pool.blocks[3], table[1]])
    assert pool.reset_prefix_cache() and pool.get_cached_block(hashes[0], [0]) is None
    pool.check_integrity({})


def test_reset_is_refused_while_blocks_are_in_use():
    pool = BlockPool(4)
    table = pool.get_new_blocks(2)
    pool.cache_full_blocks(table, chain(2), 0, 2, group_id=0)
    assert not pool.reset_prefix_cache()
    pool.free_blocks(table)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(chain(1)[0], [0]) is None
    assert all(block.block_hash is None for block in pool.blocks)
    pool.check_integrity({})


def test_observers_see_what_can_be_hit():
    pool = BlockPool(4)
    events = []
    pool.observers.append(events.append)
    hashes = chain(3)
    table = pool.get_new_blocks(3)
    pool.cache_full_blocks(table, hashes, 0, 1, group_id=2)
    pool.cache_full_blocks(table, hashes, 1, 3, group_id=2)
    pool.free_blocks(reversed(table))
    pool.get_new_blocks(1)
    assert events == [
        BlocksStored(2, (1,), (hashes[0],), None),
        BlocksStored(2, (2, 3), tuple(hashes[1:]), hashes[0]),
        BlockRemoved(2, 3, hashes[2]),
    ]
    pool.free_blocks([table[2]])
    pool.reset_prefix_cache()
    assert events[-1] == AllBlocksCleared()


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, block: setattr(block, "ref_cnt", 2),
        lambda pool, block: setattr(block, "ref_cnt", 0),
        lambda pool, block: setattr(block, "block_hash", b"x"),
        lambda pool, block: setattr(pool.free_queue, "num_free_blocks", 1),
        lambda pool, block: setattr(pool.blocks[3], "ref_cnt", 1),
    ],
)
def test_integrity_check_notices(damage):
    pool = BlockPool(5)
    (block,) = pool.get_new_blocks(1)
    pool.check_integrity({1: 1})
    damage(pool, block)
    with pytest.raises(KVCacheIntegrityError):
        pool.check_integrity({1: 1})


def test_a_million_blocks_start_quickly():
    start = time.process_time()
    pool = BlockPool(1_000_000)
    assert time.process_time() - start < 1.0
    assert pool.num_free_blocks == 999_999
