"""All groups together: common hits, two-phase allocation, gates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.runtime.kv import (
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheIntegrityError,
    KVCacheManager,
    SlidingWindowSpec,
)
from pagebinder.runtime.request import Request

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}


def full(block_size=2):
    return KVCacheGroup(FullAttentionSpec(block_size=block_size, **DIMS), ("full",))


def window(tokens, block_size=2):
    return KVCacheGroup(SlidingWindowSpec(block_size=block_size, window=tokens, **DIMS), ("window",))


def make(*groups, num_blocks=50, max_model_len=64, max_in_flight_tokens=64, **options):
    return KVCacheManager(
        groups, num_blocks, max_model_len=max_model_len, max_in_flight_tokens=max_in_flight_tokens, **options
    )


def request(kv, name, tokens, **options):
    new = Request(name, tokens, max_tokens=8, **options)
    kv.extend_hashes(new)
    return new


def run(kv, req, num_tokens):
    """Allocate and compute the request's next tokens."""
    assert kv.allocate_slots(req, num_tokens)
    req.num_computed_tokens += num_tokens
    kv.cache_blocks(req)


def computed_and_freed(kv, name, tokens, **options):
    first = request(kv, name, tokens, **options)
    run(kv, first, len(tokens))
    kv.free(first)
    kv.check_integrity()


def test_the_last_token_is_always_computed():
    kv = make(full())
    computed_and_freed(kv, "a", list(range(8)))
    assert kv.find_prefix(request(kv, "b", list(range(8)))).num_tokens == 6
    assert kv.find_prefix(request(kv, "c", list(range(9)))).num_tokens == 8
    assert kv.find_prefix(request(kv, "d", [5, *range(1, 9)])).num_tokens == 0


def test_salts_and_disabled_caching_share_nothing():
    kv = make(full())
    computed_and_freed(kv, "a", list(range(8)), cache_salt="x")
    assert kv.find_prefix(request(kv, "b", list(range(8)))).num_tokens == 0
    assert kv.find_prefix(request(kv, "c", list(range(8)), cache_salt="x")).num_tokens == 6
    off = make(full(), window(5), enable_caching=False)
    computed_and_freed(off, "a", list(range(8)))
    assert off.find_prefix(request(off, "b", list(range(8)))).num_tokens == 0
    assert not off.prefix_may_grow(request(off, "b", list(range(8))), 0)


def test_only_computed_blocks_are_shared():
    kv = make(full())
    a = request(kv, "a", list(range(12)))
    run(kv, a, 5)
    assert kv.find_prefix(request(kv, "b", list(range(12)))).num_tokens == 4
    kv.check_integrity()


def test_full_and_window_agree_on_the_longest_common_hit():
    kv = make(full(), window(5))
    computed_and_freed(kv, "a", list(range(16)))
    hit = kv.find_prefix(request(kv, "b", list(range(16))))
    assert hit.num_tokens == 14
    assert [block.is_null for block in hit.blocks[1]] == [True] * 5 + [False] * 2
    # Without the window's block 6 (tokens 12, 13) the best resume point is 12, and the full group is cut.
    kv.pool.evict_blocks([hit.blocks[1][6].block_id])
    shorter = kv.find_prefix(request(kv, "b", list(range(16))))
    assert shorter.num_tokens == 12
    assert [len(blocks) for blocks in shorter.blocks] == [6, 6]


def test_a_full_miss_limits_the_window():
    kv = make(full(), window(5))
    computed_and_freed(kv, "a", list(range(16)))
    hit = kv.find_prefix(request(kv, "b", list(range(16))))
    kv.pool.evict_blocks([hit.blocks[0][3].block_id])
    assert kv.find_prefix(request(kv, "b", list(range(16)))).num_tokens == 6


@settings(max_examples=60)
@given(
    st.sets(st.integers(0, 30)),
    st.sampled_from(
        [[full()], [full(), window(5)], [window(3), full(4), window(9)], [full(4), window(5, 8)]]
    ),
)
def test_common_hit_is_the_longest_that_every_group_can_resume_from(evicted, groups):
    kv = make(*groups, num_blocks=120)
    a = request(kv, "a", list(range(48)))
    run(kv, a, 48)
    cached = []
    for manager in kv.managers:
        ids = manager.block_ids("a").tolist()
        kv.pool.evict_blocks([ids[i] for i in evicted if i < len(ids)])
        cached.append([block.block_hash is not None for block in manager.tables["a"].blocks])

    def resumable(n):
        return n % kv.alignment == 0 and all(
            all(have[m.get_num_skipped_tokens(n) // m.block_size : -(-n // m.block_size)])
            for m, have in zip(kv.managers, cached)
        )

    best = max(n for n in range(48) if resumable(n))
    hit = kv.find_prefix(request(kv, "b", list(range(48))))
    assert hit.num_tokens == best
    assert [len(b) for b in hit.blocks] == [best // m.block_size for m in kv.managers]
    assert [g.tail is not None for g in hit.groups] == [best % m.block_size > 0 for m in kv.managers]
    if best + kv.alignment < 48:
        assert kv.prefix_may_grow(a, max(0, best - kv.alignment)) or best == 0


def test_hits_are_held_in_all_groups_before_anything_is_allocated():
    # 8 usable blocks, all cached by "a": 4 full, 4 window. Its window hit lies at the front of the queue.
    kv = make(full(), window(5), num_blocks=9)
    computed_and_freed(kv, "a", list(range(8)))
    assert kv.num_free_blocks == 8
    b = request(kv, "b", [*range(8), 50, 51, 52])
    hit = kv.find_prefix(b)
    assert hit.num_tokens == 8
    held = [[block.block_id for block in blocks] for blocks in hit.blocks]
    # Needs 4 + 2 hit blocks and one new block per group: exactly the 8 there are.
    assert kv.allocate_slots(b, 2, hit)
    tables = kv.block_ids("b")
    assert [ids[:4].tolist() for ids in tables] == held
    assert len(tables[0]) == len(tables[1]) == 5
    assert kv.num_free_blocks == 0
    kv.check_integrity()


def test_allocation_that_does_not_fit_takes_nothing():
    kv = make(full(), window(5), num_blocks=9)
    a = request(kv, "a", list(range(20)))
    assert not kv.allocate_slots(a, 10)
    assert kv.num_free_blocks == 8
    assert kv.allocate_slots(a, 8)
    a.num_computed_tokens = 8
    # Tokens 0..3 are behind the window of position 8: two blocks come back and are enough for 1 + 1.
    assert kv.allocate_slots(a, 2)
    assert kv.block_ids("a")[1][:2].tolist() == [0, 0]
    assert kv.num_free_blocks == 0
    assert kv.usage == 1.0
    with pytest.raises(ValueError, match="at least 1"):
        kv.allocate_slots(a, 0)


def test_gate_and_watermark():
    kv = make(full(), num_blocks=9)
    a = request(kv, "a", list(range(18)))
    assert not kv.allocate_slots(a, 2, full_sequence_must_fit=True)
    assert not kv.allocate_slots(a, 2, watermark_blocks=8)
    assert kv.allocate_slots(a, 2, watermark_blocks=7)
    long = make(window(5), num_blocks=9, max_in_flight_tokens=4)
    b = request(long, "b", list(range(40)))
    assert long.allocate_slots(b, 4, full_sequence_must_fit=True), "its window needs only 5 blocks at a time"


def test_lookahead_never_passes_the_model_length():
    kv = make(full(), max_model_len=10)
    a = request(kv, "a", list(range(9)))
    assert kv.allocate_slots(a, 9, num_lookahead_tokens=20)
    assert len(kv.block_ids("a")[0]) == 5


def test_groups_of_different_block_sizes_share_hashes_and_align():
    kv = make(full(4), window(5, block_size=2))
    assert kv.hasher.hash_block_size == 2 and kv.alignment == 2
    computed_and_freed(kv, "a", list(range(14)))
    hit = kv.find_prefix(request(kv, "b", list(range(14))))
    assert hit.num_tokens == 12
    assert [len(blocks) for blocks in hit.blocks] == [3, 6]


def test_reset_needs_an_idle_cache():
    kv = make(full())
    a = request(kv, "a", list(range(8)))
    run(kv, a, 8)
    assert not kv.reset_prefix_cache()
    kv.free(a)
    assert kv.reset_prefix_cache()
    assert kv.find_prefix(a).num_tokens == 0


def test_integrity_check_sees_foreign_blocks_and_wrong_counts():
    kv = make(full(), window(5))
    a = request(kv, "a", list(range(8)))
    run(kv, a, 8)
    kv.pool.touch([kv.managers[0].tables["a"].blocks[0]])
    with pytest.raises(KVCacheIntegrityError, match="reference counts"):
        kv.check_integrity()
    table = kv.managers[1].tables["a"]
    table.blocks[0] = kv.managers[0].tables["a"].blocks[0]
    table.ids[0] = table.blocks[0].block_id
    with pytest.raises(KVCacheIntegrityError, match="another group"):
        kv.check_integrity()
