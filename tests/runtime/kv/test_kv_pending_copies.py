"""Copies that were recorded and not made yet: a step failed, or the schedule goes on.

No block may be handed out while such a copy writes into it or reads from it, and nobody may find a block whose
contents will never come.
"""

import pytest

from pagebinder.runtime.kv import BlockCopy, HostBlocks, KVCacheIntegrityError
from tests.runtime.kv.cache_driver import full, ring
from tests.runtime.kv.test_kv_copies import TEXT, fork, ids, make, start


def fork_with_copy(kv, parent, name):
    """A fork that has been given blocks for its own token, so its last block awaits a copy."""
    child = fork(kv, parent, name)
    assert kv.allocate_slots(child, 1)
    kv.check_integrity()
    return child


def free_all(kv, *requests):
    for request in requests:
        kv.free(request)
        kv.check_integrity()


def test_a_copy_is_forgotten_when_its_block_comes_back_from_a_step_in_flight():
    kv = make(full(4))
    a = start(kv, "a", TEXT[:6])
    step = kv.step_started()
    b = fork_with_copy(kv, a, "b")
    kv.free(b)
    assert kv.num_deferred_blocks == 1
    kv.step_finished(step)
    kv.check_integrity()
    assert kv.take_copies() == [] and kv.num_deferred_blocks == 0
    kv.free(a)
    assert kv.usage == 0.0


def test_a_block_that_comes_back_from_a_step_in_flight_is_filled_for_its_new_owner_only():
    kv = make(ring(4, 2), full(4), num_blocks=6, host_blocks=HostBlocks(4))
    a = start(kv, "a", TEXT[:4])
    s = start(kv, "s", TEXT[20:24])
    image = kv.swap_out(s)
    kv.take_swaps()
    step = kv.step_started()
    b = fork_with_copy(kv, a, "b")
    (dst,) = ids(kv, "b")  # the ring
    kv.free(b)
    kv.step_finished(step)
    assert kv.swap_in(s, image)
    kv.check_integrity()
    assert [swap.block for swap in kv.take_swaps()] == ids(kv, "s") + ids(kv, "s", 1)
    assert dst in ids(kv, "s") + ids(kv, "s", 1) and kv.take_copies() == []


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_chain_of_copies_is_forgotten_to_its_beginning(in_flight):
    kv = make(full(4))
    a = start(kv, "a", TEXT[:6])
    step = kv.step_started() if in_flight else None
    b = fork_with_copy(kv, a, "b")
    c = fork_with_copy(kv, b, "c")
    free_all(kv, a, b)
    assert len(kv.context.copies) == 2, "c's block is a copy of b's, which is a copy of a's"
    kv.free(c)
    if in_flight:
        kv.step_finished(step)
    kv.check_integrity()
    assert kv.take_copies() == [] and kv.usage == 0.0


def test_the_rest_of_a_chain_is_still_copied():
    kv = make(full(4))
    a = start(kv, "a", TEXT[:6])
    b = fork_with_copy(kv, a, "b")
    c = fork_with_copy(kv, b, "c")
    free_all(kv, a, b)
    step = kv.step_started()
    assert kv.take_copies() == [BlockCopy(2, 3), BlockCopy(3, 4)]
    assert [kv.pool.blocks[i].ref_cnt for i in (2, 3)] == [1, 1], "the step reads both"
    kv.step_finished(step)
    assert [kv.pool.blocks[i].ref_cnt for i in (2, 3)] == [0, 0]
    free_all(kv, c)


def test_a_block_whose_contents_never_came_cannot_be_hit():
    kv = make(full(4), host_blocks=HostBlocks(4))
    a = start(kv, "a", TEXT[:9])
    saved = ids(kv, "a")
    step = kv.step_started()
    image = kv.swap_out(a)
    assert kv.swap_in(a, image)
    kv.step_finished(step)
    kv.cache_blocks(a)  # that step's results are in
    kv.pool.evict_blocks(saved)  # as if others had taken the old blocks
    free_all(kv, a)
    assert all(swap.to_host for swap in kv.take_swaps())
    assert kv.find_prefix(a).num_tokens == 0


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda kv, src, dst: kv.context.copies.copy(src, 40), r"free blocks are pending: \[40\]"),
        (lambda kv, src, dst: kv.context.copies.to_device(40, 0), r"free blocks are pending: \[40\]"),
        (lambda kv, src, dst: kv.context.copies.to_device(dst, 0), "two sources"),
        (lambda kv, src, dst: kv.context.copies.copy(dst, src), "copied before it is filled"),
        (lambda kv, src, dst: kv.context.fence.pins.subtract({src: 1}), "sources .* not held"),
        (lambda kv, src, dst: kv.context.fence._held.clear(), "nobody waits"),
    ],
)
def test_integrity_check_sees_a_copy_that_nobody_guards(break_it, problem):
    kv = make(full(4))
    a = start(kv, "a", TEXT[:6])
    fork_with_copy(kv, a, "b")
    break_it(kv, 2, 3)
    with pytest.raises(KVCacheIntegrityError, match=problem):
        kv.context.fence.check_integrity()
