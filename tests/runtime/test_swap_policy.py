"""Swap or recompute: the cost model, and the scheduler that follows it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pagebinder.runtime.kv import FullAttentionSpec, KVCacheGroup, KVCacheManager
from pagebinder.runtime.kv.host_blocks import HostBlocks
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler
from pagebinder.runtime.swap_policy import Rate, SwapPolicy

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
FULL = KVCacheGroup(FullAttentionSpec(block_size=4, **DIMS), ("full",))


def policy(name="auto", *, copy_bytes_per_second=None, tokens_per_second=None, bytes_per_block=1000):
    chosen = SwapPolicy(name, bytes_per_block)
    if copy_bytes_per_second:
        chosen.note_copy(copy_bytes_per_second, 1.0)
    if tokens_per_second:
        chosen.note_prefill(tokens_per_second, 1.0)
    return chosen


def image(num_blocks, num_tokens):
    return SimpleNamespace(num_blocks=num_blocks, num_computed_tokens=num_tokens)


def test_a_rate_follows_its_samples():
    rate = Rate()
    assert rate.per_second is None
    rate.add(100, 2.0)
    assert rate.per_second == pytest.approx(50)
    for _ in range(100):
        rate.add(300, 1.0)
    assert rate.per_second == pytest.approx(300, rel=1e-3)


def test_the_return_is_chosen_by_cost():
    # 10 blocks: 10,000 bytes at 1 MB/s take 10 ms.
    fast = policy(copy_bytes_per_second=1_000_000, tokens_per_second=1_000)  # 40 tokens: 40 ms
    assert fast.prefers_swap_in(image(10, 40), 50, 0)
    assert fast.prefers_swap_in(image(10, 40), 50, 29)  # 11 tokens: 11 ms
    assert not fast.prefers_swap_in(image(10, 40), 50, 31)  # 9 ms
    slow = policy(copy_bytes_per_second=1_000_000, tokens_per_second=5_000)  # 8 ms
    assert not slow.prefers_swap_in(image(10, 40), 50, 0)


def test_without_measurements_nothing_is_swapped_unless_always():
    assert not policy().prefers_swap_in(image(1, 1000), 1000, 0)
    assert not policy(copy_bytes_per_second=1e9).prefers_swap_in(image(1, 1000), 1000, 0)
    assert policy("always").prefers_swap_in(image(1000, 1), 1, 0)
    assert not policy("never", copy_bytes_per_second=1e9, tokens_per_second=1).prefers_swap_in(
        image(1, 1000), 1000, 0
    )


def make(swaps, *, num_blocks=6, slots=10, caching=False):
    kv = KVCacheManager(
        (FULL,), num_blocks, max_model_len=64, max_in_flight_tokens=32, enable_caching=caching,
        host_blocks=HostBlocks(slots),
    )  # fmt: skip
    return Scheduler(
        kv, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64, swap_policy=swaps
    )  # fmt: skip


def add(scheduler, name, tokens, max_tokens):
    request = Request(name, tokens, max_tokens=max_tokens)
    scheduler.add_request(request)
    return request


def step(scheduler):
    output = scheduler.schedule()
    swaps, _ = scheduler.kv.take_swaps(), scheduler.kv.take_copies()
    scheduler.update(output, [7] * len(output.sampling))
    scheduler.check_integrity()
    return output, swaps


def preempt_one(scheduler):
    """a and b fill the pool of 5; a's next block comes from b."""
    add(scheduler, "a", [1] * 12, 3)
    b = add(scheduler, "b", [5] * 8, 4)
    step(scheduler)
    output, swaps = step(scheduler)
    assert output.preempted_ids == ("b",)
    return b, swaps


def test_a_swapped_request_comes_back_with_its_tokens():
    scheduler = make(policy("always"))
    b, swaps = preempt_one(scheduler)
    assert [s.to_host for s in swaps] == [True, True]
    assert b.swap_image.num_computed_tokens == 8
    while b.swap_image is not None:
        output, swaps = step(scheduler)
    assert [s.to_host for s in swaps] == [False, False]
    scheduled = {s.request.request_id: (s.start, s.num_new_tokens) for s in output.scheduled}
    assert scheduled["b"] == (8, 1)  # nothing is computed twice
    while scheduler.has_unfinished:
        step(scheduler)
    stats = scheduler.stats
    assert (stats.num_swaps_out, stats.num_swaps_in, stats.resumed_queried_tokens) == (1, 1, 0)
    assert b.num_output_tokens == 4 and scheduler.kv.swapper.host.num_free == 10


def test_auto_swaps_only_when_copying_is_faster():
    for rate, swapped in ((1_000, 1), (1_000_000, 0)):  # tokens a second
        scheduler = make(policy(copy_bytes_per_second=1_000_000, tokens_per_second=rate))
        b, _ = preempt_one(scheduler)
        assert (b.swap_image is not None) == bool(swapped)
        while scheduler.has_unfinished:
            step(scheduler)
        assert (scheduler.stats.num_swaps_out, scheduler.stats.num_swaps_in) == (swapped, swapped)


def test_a_prefix_hit_can_make_an_image_useless():
    swaps = policy(copy_bytes_per_second=1_000_000, tokens_per_second=1_000)
    scheduler = make(swaps, caching=True)
    b, _ = preempt_one(scheduler)
    assert b.swap_image is not None
    swaps.prefers_swap_in = lambda image, num_tokens, num_hit_tokens: False
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.stats.num_swaps_in == 0 and b.num_output_tokens == 4
    assert scheduler.kv.swapper.host.num_free == 10


def test_without_free_slots_the_request_is_recomputed():
    scheduler = make(policy("always"), slots=1)
    b, swaps = preempt_one(scheduler)
    assert b.swap_image is None and swaps == []
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.stats.num_swaps_out == 0 and b.num_output_tokens == 4


def test_an_aborted_request_gives_its_slots_back():
    scheduler = make(policy("always"))
    preempt_one(scheduler)
    scheduler.abort("b")
    step(scheduler)
    scheduler.check_integrity()
    assert scheduler.kv.swapper.host.num_free == 10


def test_lost_tokens_are_estimated_from_those_that_came_back():
    swaps = policy(copy_bytes_per_second=1_000_000, tokens_per_second=1_000)  # a block: 1 ms each way
    request = SimpleNamespace(request_id="a", num_computed_tokens=40)
    kv = SimpleNamespace(block_ids=lambda _: [[3, 4, 0, 5], [6]])  # 4 blocks: 8 ms
    assert swaps.prefers_swap_out(kv, request)
    for _ in range(40):
        swaps.note_recompute(100, 90)
    assert not swaps.prefers_swap_out(kv, request)  # about 4 of 40 tokens are lost: 4 ms
