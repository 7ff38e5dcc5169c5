"""Steps in flight: scheduling ahead of results, and blocks that are not handed out before their step is done."""

from __future__ import annotations

import random
from collections import deque

import pytest

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv import FullAttentionSpec, KVCacheGroup, KVCacheManager, SlidingWindowSpec
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
FULL = KVCacheGroup(FullAttentionSpec(block_size=4, **DIMS), ("full",))
WINDOW = KVCacheGroup(SlidingWindowSpec(block_size=4, window=6, **DIMS), ("window",))


def make(*groups, steps=2, num_blocks=100, budget=32, max_model_len=64, max_num_seqs=8, caching=True):
    kv = KVCacheManager(
        groups or (FULL,), num_blocks, max_model_len=max_model_len, max_in_flight_tokens=budget * steps,
        enable_caching=caching,
    )  # fmt: skip
    return Scheduler(
        kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len,
        max_steps_in_flight=steps,
    )  # fmt: skip


def add(scheduler, name, prompt, max_tokens=4):
    request = Request(name, list(range(prompt)) if isinstance(prompt, int) else prompt, max_tokens=max_tokens)
    scheduler.add_request(request)
    return request


def summary(output):
    return [(s.request.request_id, s.start, s.num_new_tokens, s.samples) for s in output.scheduled]


def finish(scheduler, output):
    return scheduler.update(output, [7] * len(output.sampling))


def test_a_second_step_takes_who_is_not_in_flight():
    scheduler = make(max_num_seqs=2)
    a = add(scheduler, "a", 5)
    first = scheduler.schedule()
    assert summary(first) == [("a", 0, 5, True)]
    add(scheduler, "b", [5] * 3)
    second = scheduler.schedule()
    assert summary(second) == [("b", 0, 3, True)]
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        scheduler.schedule()
    finish(scheduler, first)
    assert a.output_token_ids == [7]
    third = scheduler.schedule()
    assert summary(third) == [("a", 5, 1, True)]
    finish(scheduler, second)
    finish(scheduler, third)
    scheduler.check_integrity()


def test_further_chunks_of_a_prompt_may_be_in_flight_at_once():
    scheduler = make(budget=8, steps=3)
    add(scheduler, "a", 20)
    outputs = [scheduler.schedule() for _ in range(3)]
    assert [summary(o) for o in outputs] == [[("a", 0, 8, False)], [("a", 8, 8, False)], [("a", 16, 4, True)]]
    scheduler.check_integrity()
    for output in outputs:
        finish(scheduler, output)
    assert summary(scheduler.schedule()) == [("a", 20, 1, True)]


def test_with_everybody_in_flight_a_step_is_empty():
    scheduler = make()
    request = add(scheduler, "a", 5, max_tokens=2)
    first = scheduler.schedule()
    empty = scheduler.schedule()
    assert empty.total_num_tokens == 0 and empty.step is None
    assert scheduler.update(empty, []) == []
    finish(scheduler, first)
    finish(scheduler, scheduler.schedule())
    assert request.finish_reason == "length"


def test_results_must_come_in_order():
    scheduler = make()
    add(scheduler, "a", 5)
    first = scheduler.schedule()
    add(scheduler, "b", [5] * 3)
    second = scheduler.schedule()
    with pytest.raises(ValueError, match="given already, or another"):
        finish(scheduler, second)
    finish(scheduler, first)
    finish(scheduler, second)
    with pytest.raises(ValueError, match="given already, or another"):
        finish(scheduler, second)


def test_discarded_steps_are_scheduled_again():
    scheduler = make(budget=8)
    add(scheduler, "a", 20)
    first = [summary(scheduler.schedule()) for _ in range(2)]
    scheduler.discard()
    scheduler.check_integrity()
    assert [summary(scheduler.schedule()) for _ in range(2)] == first


def test_the_cache_must_be_planned_for_the_steps_in_flight():
    kv = KVCacheManager((FULL,), 10, max_model_len=64, max_in_flight_tokens=32)
    with pytest.raises(ConfigError, match="steps of 32 tokens"):
        Scheduler(kv, max_num_seqs=1, max_num_batched_tokens=32, max_model_len=64, max_steps_in_flight=2)


def test_blocks_of_an_aborted_request_come_back_when_its_step_is_done():
    scheduler = make(caching=False)
    add(scheduler, "a", 9)
    first = scheduler.schedule()
    free = scheduler.kv.num_free_blocks
    scheduler.abort("a")
    assert (scheduler.kv.num_free_blocks, scheduler.kv.num_deferred_blocks) == (free, 3)
    add(scheduler, "b", [5] * 9)
    second = scheduler.schedule()
    assert scheduler.update(first, [7]) == []
    assert (scheduler.kv.num_free_blocks, scheduler.kv.num_deferred_blocks) == (free, 0)
    assert [r.request_id for r in scheduler.update(second, [7])] == []
    scheduler.check_integrity()


def test_nobody_is_preempted_for_blocks_that_could_not_be_used_yet():
    scheduler = make(num_blocks=6, caching=False, budget=16)  # 5 usable
    a = add(scheduler, "a", 8, max_tokens=9)
    first = scheduler.schedule()
    b = add(scheduler, "b", [5] * 12, max_tokens=4)
    second = scheduler.schedule()
    assert summary(second) == [("b", 0, 12, True)]
    finish(scheduler, first)
    blocked = scheduler.schedule()  # a needs a third block, all five are held
    assert blocked.total_num_tokens == 0 and blocked.preempted_ids == ()
    finish(scheduler, second)
    assert scheduler.schedule().preempted_ids == ("b",)
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)


class Pipeline:
    """Runs steps behind the scheduler's back, as a device would: in order, some time after they are scheduled."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.flying: deque = deque()

    def launch(self) -> None:
        output, kv = self.scheduler.schedule(), self.scheduler.kv
        copies = kv.take_copies()
        if output.step is None:
            return
        self.check_writes(output, {copy.dst for copy in copies})
        used = {r.request_id: self.blocks(r) for r in output.requests}
        self.flying.append((output, used))

    def blocks(self, request) -> set[int]:
        return {int(b) for ids in self.scheduler.kv.block_ids(request.request_id) for b in ids if b}

    def check_writes(self, output, copied: set[int]) -> None:
        """Nothing that this step writes is used by somebody else's step in flight."""
        for item in output.scheduled:
            name, written = item.request.request_id, set(copied)
            for g, ids in enumerate(self.scheduler.kv.block_ids(name)):
                size = self.scheduler.kv.groups[g].block_size
                end = item.start + item.num_new_tokens
                written |= {int(b) for b in ids[item.start // size : -(-end // size)]}
            for _, used in self.flying:
                others = set().union(*(blocks for i, blocks in used.items() if i != name), set())
                assert not written & others, f"{name} writes blocks {written & others} that are in flight"

    def land(self) -> None:
        if self.flying:
            output, _ = self.flying.popleft()
            self.scheduler.update(
                output,
                [1 + sum(output.requests[r].all_token_ids) % 3 for r in output.sampling],
            )


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_never_reuses_a_block_in_flight(seed):
    rng = random.Random(seed)
    layout = [(FULL,), (WINDOW,), (FULL, WINDOW)][seed % 3]
    steps, budget = rng.choice([2, 3]), rng.choice([4, 8])
    one = sum(g.spec.max_blocks_per_request(48, budget * steps) for g in layout)
    scheduler = make(
        *layout, steps=steps, num_blocks=1 + one + rng.randint(0, 6), budget=budget, max_model_len=48,
        caching=seed % 4 > 0,
    )  # fmt: skip
    pipeline, added = Pipeline(scheduler), []
    for i in range(30):
        prompt = [1, 2, 3, 1, 2, 3, 1, 1][: rng.randint(1, 8)] + rng.choices([1, 2, 3], k=rng.randint(1, 12))
        added.append(add(scheduler, f"r{i}", prompt, rng.randint(1, 20)))
        for _ in range(rng.randint(1, 5)):
            if len(pipeline.flying) < steps:
                pipeline.launch()
            if rng.random() < 0.6:
                pipeline.land()
            if rng.random() < 0.08 and scheduler.requests:
                scheduler.abort(rng.choice(sorted(scheduler.requests)))
            if rng.random() < 0.03:
                scheduler.discard()
                pipeline.flying.clear()
            scheduler.check_integrity()
    for _ in range(5000):
        if not scheduler.has_unfinished and not pipeline.flying:
            break
        if len(pipeline.flying) < steps:
            pipeline.launch()
        if rng.random() < 0.7:
            pipeline.land()
    assert not scheduler.has_unfinished, "requests starve"
    assert scheduler.kv.usage == 0.0 and scheduler.kv.num_deferred_blocks == 0
    for request in added:
        tokens = list(request.prompt_token_ids)
        for token in request.output_token_ids:
            assert token == 1 + sum(tokens) % 3
            tokens.append(token)
        if request.finish_reason == "length":
            assert request.num_output_tokens == min(request.max_tokens, 48 - request.num_prompt_tokens)
