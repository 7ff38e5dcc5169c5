"""Kinds that are not rows of the decoder's tokens: recurrent checkpoints, rings, encoder blocks."""

import pytest

from pagebinder.errors import CacheCapacityError
from pagebinder.runtime.kv import BlockCopy, KVCacheManager, PrefixRetention
from pagebinder.runtime.request import Request
from tests.runtime.kv.cache_driver import cross, full, recurrent, ring, window

TEXT = list(range(48))


def make(*groups, num_blocks=50, **options):
    options = {"max_model_len": 48, "max_in_flight_tokens": 48, "max_encoder_tokens": 6} | options
    return KVCacheManager(groups, num_blocks, **options)


def start(kv, name, tokens, count=None, **options):
    """A new request with its hit, and blocks for `count` more tokens (all it has)."""
    request = Request(name, tokens, max_tokens=8, **options)
    kv.extend_hashes(request)
    hit = kv.find_prefix(request)
    assert kv.allocate_slots(request, count or request.num_tokens - hit.num_tokens, hit)
    request.num_computed_tokens = hit.num_tokens
    kv.check_integrity()
    return request


def compute(kv, request, num_tokens):
    """Blocks for the next tokens up to `num_tokens`, and their results."""
    if num_tokens > request.num_computed_tokens:
        assert kv.allocate_slots(request, num_tokens - request.num_computed_tokens)
    request.num_computed_tokens = num_tokens
    kv.cache_blocks(request)
    kv.check_integrity()


def ids(kv, name, group=0):
    return kv.block_ids(name)[group].tolist()


# Recurrent


def test_every_boundary_is_a_checkpoint_when_retention_is_dense():
    kv = make(recurrent(4))
    a = start(kv, "a", TEXT[:11])
    assert ids(kv, "a") == [1, 2, 3]
    compute(kv, a, 11)
    assert start(kv, "b", TEXT[:11]).num_computed_tokens == 8
    assert ids(kv, "b")[:2] == [0, 2], "the last state is enough"
    assert start(kv, "c", TEXT[:8]).num_computed_tokens == 4, "the last token must be computed"


def test_sparse_retention_takes_blocks_for_retained_boundaries_only():
    kv = make(recurrent(4), retention=PrefixRetention.sparse())
    a = start(kv, "a", TEXT[:19])
    # Checkpoint of 16 = last boundary of the prompt; the running state of token 18.
    assert ids(kv, "a") == [0, 0, 0, 1, 2]
    assert kv.next_cache_at(a) == 16
    compute(kv, a, 19)
    assert kv.next_cache_at(a) > 48
    assert start(kv, "b", TEXT[:17]).num_computed_tokens == 16
    every_8 = make(recurrent(4), retention=PrefixRetention.sparse(8))
    start(every_8, "a", TEXT[:19])
    assert ids(every_8, "a") == [0, 1, 0, 2, 3]


def test_without_caching_only_the_running_state_is_kept():
    kv = make(recurrent(4), enable_caching=False)
    a = start(kv, "a", TEXT[:19])
    assert ids(kv, "a") == [0, 0, 0, 0, 1]
    compute(kv, a, 20)
    compute(kv, a, 21)
    assert ids(kv, "a") == [0, 0, 0, 0, 1, 2]
    compute(kv, a, 22)
    assert ids(kv, "a") == [0, 0, 0, 0, 0, 2], "the state of a block that is left behind is not needed"
    assert kv.max_blocks_for(48) == 2


def test_a_step_may_end_earlier_than_the_one_that_was_planned():
    kv = make(recurrent(4), retention=PrefixRetention.sparse())
    a = start(kv, "a", TEXT[:19])
    assert kv.covered_tokens("a") == 0, "block 0 is null: not every shorter step could store its state"
    assert kv.allocate_slots(a, 6)
    assert ids(kv, "a") == [0, 1] and kv.num_free_blocks == 48, "the other step's blocks serve this one"
    a.num_computed_tokens = 6
    assert kv.allocate_slots(a, 1)
    assert kv.covered_tokens("a") == 8


def test_a_fork_copies_the_running_state_but_not_a_checkpoint():
    kv = make(recurrent(4))
    a = start(kv, "a", TEXT[:10])
    a.num_computed_tokens = 8
    inside, at_boundary = Request("b", TEXT[:12], max_tokens=2), Request("c", TEXT[:12], max_tokens=2)
    at_boundary.num_computed_tokens = 8
    kv.fork(a, at_boundary)
    assert ids(kv, "c") == [0, 2]
    compute(kv, at_boundary, 9)
    assert ids(kv, "c") == [0, 2, 4] and kv.take_copies() == []
    compute(kv, a, 10)
    inside.num_computed_tokens = 10
    kv.fork(a, inside)
    assert kv.covered_tokens("a") == kv.covered_tokens("b") == 10
    compute(kv, inside, 11)
    assert kv.take_copies() == [BlockCopy(3, ids(kv, "b")[2])] and ids(kv, "a")[2] == 3


def test_recurrent_and_full_agree_on_a_boundary_of_both():
    kv = make(full(4), recurrent(6), prefix_match_unit=2)
    assert kv.alignment == 6
    compute(kv, start(kv, "a", TEXT[:20]), 20)
    b = start(kv, "b", TEXT[:20])
    assert b.num_computed_tokens == 18
    # 18 tokens end inside block 4 of the full group, which is copied.
    assert len(kv.take_copies()) == 1
    assert ids(kv, "b", 1)[:3] == [0, 0, ids(kv, "a", 1)[2]]


# Ring


def test_a_ring_is_one_block_and_resumes_at_its_multiples_without_it():
    kv = make(full(2), ring(8, 4))
    assert kv.alignment == 4
    compute(kv, start(kv, "a", TEXT[:15]), 15)
    b = start(kv, "b", TEXT[:15])
    assert b.num_computed_tokens == 12
    assert len(ids(kv, "a", 1)) == len(ids(kv, "b", 1)) == 1 and ids(kv, "a", 1) != ids(kv, "b", 1)


def test_a_ring_without_resume_points_turns_prefix_hits_off():
    kv = make(full(2), ring(8, None))
    a = start(kv, "a", TEXT[:15])
    compute(kv, a, 15)
    assert start(kv, "b", TEXT[:15]).num_computed_tokens == 0
    assert kv.next_cache_at(a) > 48 and not kv.prefix_may_grow(a, 0)


def test_a_shared_ring_is_always_copied():
    kv = make(ring(8, 4))
    a = start(kv, "a", TEXT[:8])
    a.num_computed_tokens = 8
    b = Request("b", TEXT[:12], max_tokens=2)
    b.num_computed_tokens = 8
    kv.fork(a, b)
    compute(kv, b, 9)
    assert kv.take_copies() == [BlockCopy(1, 2)]


# Cross attention


def test_encoder_blocks_are_taken_at_once_and_shared_when_the_encoder_has_run():
    kv = make(full(2), cross(4))
    image = {"encoder_hash": b"cat", "num_encoder_tokens": 6}
    a = start(kv, "a", TEXT[:2], **image)
    assert len(ids(kv, "a", 1)) == 2 and kv.needs_encoder("a") and kv.next_cache_at(a) == 1
    b = start(kv, "b", TEXT[5:7], **image)
    assert kv.needs_encoder("b"), "the first one's results are not in yet"
    compute(kv, a, 2)
    assert not kv.needs_encoder("a")
    start(kv, "c", TEXT[9:11], **image)
    assert ids(kv, "c", 1) == ids(kv, "a", 1) and not kv.needs_encoder("c")
    start(kv, "d", TEXT[9:11], encoder_hash=b"dog", num_encoder_tokens=6)
    assert kv.needs_encoder("d")
    assert start(kv, "e", TEXT[:1]) and ids(kv, "e", 1) == []
    assert not kv.needs_encoder("e")
    kv.free(b)
    kv.check_integrity()


def test_encoder_blocks_are_hit_as_a_whole_or_not_at_all_and_do_not_limit_the_prefix():
    kv = make(full(2), cross(4))
    image = {"encoder_hash": b"cat", "num_encoder_tokens": 6}
    a = start(kv, "a", TEXT[:8], **image)
    compute(kv, a, 8)
    last = ids(kv, "a", 1)[1]
    kv.free(a)
    kv.pool.evict_blocks([last])
    b = start(kv, "b", TEXT[:8], **image)
    assert b.num_computed_tokens == 6 and kv.needs_encoder("b")
    assert start(kv, "c", TEXT[:8]).num_computed_tokens == 0, "another encoder input, another chain"


def test_more_encoder_tokens_than_planned_are_refused():
    kv = make(full(2), cross(4))
    long = Request("a", TEXT[:4], max_tokens=1, encoder_hash=b"x", num_encoder_tokens=7)
    with pytest.raises(CacheCapacityError, match="max_encoder_tokens"):
        kv.allocate_slots(long, 4)
    kv.check_integrity()
    assert kv.max_blocks_for(10, 6) == 5 + 2 and kv.max_blocks_for(10) == 5


# Retention


def test_sparse_windows_hash_what_a_resume_at_the_prompts_end_needs():
    kv = make(window(5, 2), retention=PrefixRetention.sparse())
    a = start(kv, "a", TEXT[:21])
    compute(kv, a, 21)
    # 20 = last boundary of the prompt; it sees 16 .. 19.
    hashed = [block.block_hash is not None for block in kv.managers[0].tables["a"].blocks]
    assert hashed == [False] * 8 + [True, True, False]
    dense = make(window(5, 2))
    compute(dense, start(dense, "a", TEXT[:21]), 21)
    assert all(block.block_hash for block in dense.managers[0].tables["a"].blocks[:10])


def test_a_junction_is_retained_where_a_longer_prefix_was_known():
    kv = make(full(2), window(3, 2), retention=PrefixRetention.sparse())
    a = start(kv, "a", TEXT[:30])
    compute(kv, a, 30)
    kv.free(a)
    tokens = TEXT[:16] + [99] * 10
    b = start(kv, "b", tokens)
    assert b.num_computed_tokens == 0, "the window group kept only the end of the prompt"
    assert kv.context.boundaries["b"].points == (16, 24)
    compute(kv, b, 26)
    assert start(kv, "c", TEXT[:16] + [77] * 5).num_computed_tokens == 16


def test_the_end_of_a_request_can_be_resumed_under_sparse_retention():
    kv = make(full(2), window(3, 2), recurrent(4), retention=PrefixRetention.sparse())
    a = start(kv, "a", TEXT[:7])
    compute(kv, a, 7)
    for token in range(7, 22):
        a.append_output(TEXT[token])
        assert token < kv.covered_tokens("a") or kv.allocate_slots(a, 1)
        a.num_computed_tokens = token + 1
        kv.cache_blocks(a)
    kv.free(a)
    assert start(kv, "b", TEXT[:30]).num_computed_tokens == 20


def test_dense_windows_leave_out_what_no_aligned_boundary_sees():
    kv = make(full(16), window(3, 2), prefix_match_unit=2, max_in_flight_tokens=48)
    assert kv.alignment == 2
    coarse = make(recurrent(16), window(3, 2))
    assert coarse.alignment == 16
    compute(coarse, start(coarse, "a", TEXT[:40]), 40)
    hashed = [i for i, b in enumerate(coarse.managers[1].tables["a"].blocks) if b.block_hash is not None]
    assert hashed == [7, 15]
