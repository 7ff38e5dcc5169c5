"""Forks, copies on write, steps in flight, swapping: what happens to blocks while somebody still uses them."""

import pytest

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv import BlockCopy, HostBlocks, KVCacheIntegrityError, KVCacheManager, SwapCopy
from pagebinder.runtime.request import Request
from tests.runtime.kv.cache_driver import full, ring, window

TEXT = list(range(48))


def make(*groups, num_blocks=50, **options):
    return KVCacheManager(groups, num_blocks, max_model_len=48, max_in_flight_tokens=48, **options)


def start(kv, name, tokens):
    request = Request(name, tokens, max_tokens=8)
    kv.extend_hashes(request)
    assert kv.allocate_slots(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request)
    return request


def fork(kv, parent, name, own=(7,)):
    child = Request(name, parent.all_token_ids[: parent.num_computed_tokens] + list(own), max_tokens=8)
    child.num_computed_tokens = parent.num_computed_tokens
    kv.fork(parent, child)
    kv.check_integrity()
    return child


def ids(kv, name, group=0):
    return kv.block_ids(name)[group].tolist()


# Forks


def test_forks_share_everything_until_they_write():
    kv = make(full(4), window(5, 4))
    a = start(kv, "a", TEXT[:14])
    free = kv.num_free_blocks
    children = [fork(kv, a, name) for name in "bcd"]
    assert kv.num_free_blocks == free
    # Position 14 sees 10 .. 14 in the window group: blocks 0 and 1 are not shared with the children.
    assert ids(kv, "b", 1)[:2] == [0, 0] and ids(kv, "b", 1)[2:] == ids(kv, "a", 1)[2:]
    for child in children:
        assert kv.covered_tokens(child.request_id) == 14
        assert kv.allocate_slots(child, 1)
        assert kv.covered_tokens(child.request_id) == 16
    # Three copies in each group; the parent keeps the original.
    assert len(kv.take_copies()) == 6 and kv.num_free_blocks == free - 6
    assert kv.covered_tokens("a") == 14
    assert kv.allocate_slots(a, 1) and kv.take_copies() == []
    kv.check_integrity()


def test_a_fork_counts_its_copies_before_taking_anything():
    kv = make(full(4), num_blocks=5)
    a = start(kv, "a", TEXT[:14])
    b = fork(kv, a, "b")
    assert not kv.allocate_slots(b, 1)
    assert ids(kv, "a") == ids(kv, "b") and kv.take_copies() == []
    kv.free(a)
    assert kv.allocate_slots(b, 1) and kv.take_copies() == []
    kv.check_integrity()


def test_a_fork_needs_a_parent_with_blocks_and_a_new_child():
    kv = make(full(4))
    a, b = Request("a", TEXT[:4], max_tokens=1), Request("b", TEXT[:4], max_tokens=1)
    with pytest.raises(ValueError, match="must hold blocks"):
        kv.fork(a, b)
    a = start(kv, "a", TEXT[:4])
    with pytest.raises(ValueError, match="must start with the 4"):
        kv.fork(a, b)
    b.num_computed_tokens = 4
    kv.fork(a, b)
    with pytest.raises(ValueError, match="none"):
        kv.fork(a, b)


def test_a_fork_of_a_fork_copies_in_order():
    kv = make(full(4))
    a = start(kv, "a", TEXT[:6])
    b = fork(kv, a, "b")
    assert kv.allocate_slots(b, 1)
    c = fork(kv, b, "c", own=(7, 8))
    assert kv.allocate_slots(c, 1)
    assert kv.take_copies() == [BlockCopy(2, 3), BlockCopy(3, 4)]


def test_a_copy_for_a_request_that_is_gone_is_not_made_and_nothing_of_it_is_cached():
    kv = make(full(4), prefix_match_unit=1)
    a = start(kv, "a", TEXT[:6])
    b = fork(kv, a, "b")
    assert kv.allocate_slots(b, 1)
    kv.free(b)
    assert kv.take_copies() == []
    kv.free(a)
    assert kv.usage == 0.0
    kv.check_integrity()
    assert kv.find_prefix(a).num_tokens == 5


# Steps in flight


def test_freed_blocks_wait_for_the_steps_in_flight():
    kv = make(full(4), num_blocks=9)
    a, b = start(kv, "a", TEXT[:8]), start(kv, "b", TEXT[20:28])
    first = kv.step_started()
    kv.free(a)
    second = kv.step_started()
    kv.free(b)
    assert (kv.num_free_blocks, kv.num_deferred_blocks) == (4, 4)
    kv.check_integrity()
    kv.step_finished(second)
    assert kv.num_free_blocks == 4, "step 1 still runs"
    kv.step_finished(first)
    assert (kv.num_free_blocks, kv.num_deferred_blocks) == (8, 0)
    kv.check_integrity()
    with pytest.raises(ValueError, match="not in flight"):
        kv.step_finished(first)


def test_a_step_that_started_later_is_not_waited_for():
    kv = make(full(4))
    a = start(kv, "a", TEXT[:8])
    first = kv.step_started()
    kv.free(a)
    kv.step_started()
    kv.step_finished(first)
    assert kv.num_deferred_blocks == 0


def test_a_deferred_block_can_be_hit_meanwhile():
    kv = make(full(4))
    a = start(kv, "a", TEXT[:8])
    step = kv.step_started()
    kv.free(a)
    b = Request("b", TEXT[:9], max_tokens=1)
    kv.extend_hashes(b)
    hit = kv.find_prefix(b)
    assert hit.num_tokens == 8 and kv.allocate_slots(b, 1, hit)
    assert kv.num_deferred_blocks == 0, "somebody else holds them, too"
    kv.step_finished(step)
    assert ids(kv, "b")[:2] == [1, 2] and kv.num_free_blocks == 46
    kv.check_integrity()


def test_the_source_of_a_copy_waits_for_the_step_that_makes_it():
    kv = make(full(4))
    a = start(kv, "a", TEXT[:6])
    b = fork(kv, a, "b")
    assert kv.allocate_slots(b, 1)
    kv.free(a)
    source = kv.pool.blocks[2]
    assert source.ref_cnt == 1 and kv.num_deferred_blocks == 1
    failed = kv.step_started()
    kv.step_finished(failed)
    assert source.ref_cnt == 1, "that step never took its copies"
    step = kv.step_started()
    assert len(kv.take_copies()) == 1
    kv.step_finished(step)
    assert source.ref_cnt == 0
    kv.check_integrity()


def test_the_source_of_a_copy_that_no_step_will_make_is_free_at_once():
    kv = make(full(4))
    a = start(kv, "a", TEXT[:6])
    b = fork(kv, a, "b")
    assert kv.allocate_slots(b, 1)
    kv.step_finished(kv.step_started())  # it failed before it took its copies
    kv.free(a)
    kv.free(b)
    assert kv.usage == 0.0
    kv.check_integrity()


# Swapping


def test_a_request_that_has_computed_nothing_covers_nothing_when_it_is_back():
    kv = make(ring(4, 2), full(4), host_blocks=HostBlocks(4))
    a = Request("a", TEXT[:6], max_tokens=1)
    assert kv.allocate_slots(a, 6)
    image = kv.swap_out(a)
    assert image.num_blocks == 0 and kv.swap_in(a, image)
    assert kv.covered_tokens("a") == 0 and kv.allocate_slots(a, 6)
    assert kv.covered_tokens("a") == 8 and len(ids(kv, "a")) == 1


def test_a_request_goes_to_the_host_and_comes_back_to_the_same_places():
    kv = make(full(4), window(5, 4), host_blocks=HostBlocks(8))
    a = start(kv, "a", TEXT[:14])
    before = [ids(kv, "a", g) for g in (0, 1)]
    image = kv.swap_out(a)
    assert image.num_computed_tokens == 14 and "a" not in kv.rows and kv.usage == 0.0
    assert [[i for i, _ in pairs] for pairs in image.groups] == [[0, 1, 2, 3], [2, 3]]
    saved = kv.take_swaps()
    assert [s.block for s in saved] == before[0] + before[1][2:] and all(s.to_host for s in saved)
    assert [s.slot for s in saved] == image.slots
    assert kv.swap_in(a, image)
    assert [len(ids(kv, "a", g)) for g in (0, 1)] == [4, 4] and ids(kv, "a", 1)[:2] == [0, 0]
    assert kv.covered_tokens("a") == 16
    back = kv.take_swaps()
    assert back == [
        SwapCopy(block, slot, False) for block, slot in zip(ids(kv, "a") + ids(kv, "a", 1)[2:], image.slots)
    ]
    assert kv.swapper.host.num_free == 2, "the slots are read by the next step"
    kv.check_integrity()
    kv.step_finished(kv.step_started())
    assert kv.swapper.host.num_free == 8
    kv.check_integrity()


def test_swapping_needs_slots_and_blocks():
    kv = make(full(4), num_blocks=6, host_blocks=HostBlocks(3))
    a = start(kv, "a", TEXT[:14])
    assert kv.swap_out(a) is None and ids(kv, "a") == [1, 2, 3, 4] and kv.take_swaps() == []
    kv.free(a)
    b = start(kv, "b", TEXT[20:30])
    image = kv.swap_out(b)
    c = start(kv, "c", TEXT[30:42])
    assert not kv.swap_in(b, image) and "b" not in kv.rows
    kv.free(c)
    assert kv.swap_in(b, image)
    kv.check_integrity()
    with pytest.raises(ConfigError, match="at least one"):
        HostBlocks(0)
    with pytest.raises(ValueError, match="host_blocks"):
        make(full(4)).drop_image(image)


def test_a_dropped_image_gives_its_slots_back_once():
    kv = make(full(4), host_blocks=HostBlocks(4))
    image = kv.swap_out(start(kv, "a", TEXT[:14]))
    assert kv.swapper.host.num_free == 0
    kv.drop_image(image)
    assert kv.swapper.host.num_free == 4
    with pytest.raises(ValueError, match="already"):
        kv.drop_image(image)
    kv.check_integrity()


def test_a_block_that_awaits_its_copy_is_saved_from_the_source():
    kv = make(full(4), host_blocks=HostBlocks(4))
    a = start(kv, "a", TEXT[:6])
    b = fork(kv, a, "b")
    assert kv.allocate_slots(b, 1)
    assert ids(kv, "b") == [1, 3]
    image = kv.swap_out(b)
    assert [s.block for s in kv.take_swaps()] == [1, 2] and kv.take_copies() == []
    kv.drop_image(image)
    kv.free(a)
    assert kv.usage == 0.0
    kv.check_integrity()


def test_what_is_still_on_its_way_back_is_neither_saved_again_nor_cached():
    kv = make(full(4), host_blocks=HostBlocks(8), num_blocks=5)
    a = start(kv, "a", TEXT[:14])
    image = kv.swap_out(a)
    kv.take_swaps()
    assert kv.reset_prefix_cache() and kv.swap_in(a, image)
    assert kv.swap_out(a) is None
    kv.free(a)
    assert kv.take_swaps() == [] and kv.find_prefix(a).num_tokens == 0
    kv.check_integrity()
    assert kv.swapper.host.num_free == 8


def test_integrity_check_sees_a_lost_slot():
    kv = make(full(4), host_blocks=HostBlocks(4))
    kv.swapper.host.allocate(1)
    with pytest.raises(KVCacheIntegrityError, match="host slots"):
        kv.check_integrity()
