"""Random traffic on small pools, against a model of the cache's contents.

Every slot remembers which prefix was written to it. A step writes its tokens' slots and then reads what an
attention layer would read; a stale, foreign or lost slot shows as a wrong prefix. The "model" samples a
function of all tokens so far, so preemption and prefix hits must not change any request's output.
"""

import contextlib
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagebinder.errors import CacheCapacityError
from pagebinder.runtime.kv import FullAttentionSpec, KVCacheGroup, KVCacheManager, SlidingWindowSpec
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler

DIMS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
MAX_MODEL_LEN = 48


def full(block_size):
    return KVCacheGroup(FullAttentionSpec(block_size=block_size, **DIMS), ("full",))


def window(tokens, block_size):
    return KVCacheGroup(SlidingWindowSpec(block_size=block_size, window=tokens, **DIMS), ("window",))


LAYOUTS = [
    [full(4)],
    [window(6, 4)],
    [full(4), window(6, 4)],
    [full(2), window(5, 2), window(5, 2)],
    [full(4), window(7, 2), window(1, 4)],
    [full(2), window(9, 4)],
]
# Beginnings of one text with a few tokens of their own: most prompts share a prefix with others.
TEXT = [1 + i * i % 3 for i in range(32)]
PROMPTS = st.tuples(st.integers(0, len(TEXT)), st.lists(st.integers(1, 3), min_size=1, max_size=5)).map(
    lambda parts: TEXT[: parts[0]] + parts[1]
)


def next_token(tokens):
    return 1 + sum(tokens) % 3


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        num_blocks=st.integers(8, 24),
        budget=st.integers(2, 24),
        max_num_seqs=st.integers(1, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 3]),
        watermark=st.sampled_from([0.0, 0.2]),
        caching=st.booleans() | st.just(True),
    )
    def start(self, layout, num_blocks, budget, max_num_seqs, policy, threshold, watermark, caching):
        self.kv = KVCacheManager(
            layout,
            num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_in_flight_tokens=budget,
            enable_caching=caching,
        )
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN,
            policy=policy, long_prefill_token_threshold=threshold, watermark=watermark,
        )  # fmt: skip
        self.slots = {}
        self.added = {}
        self.num_offered = 0

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=4),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "s"]),
    )
    def add(self, prompts, max_tokens, priority, salt):
        for prompt in prompts:
            name = f"r{self.num_offered}"
            self.num_offered += 1
            request = Request(name, prompt, max_tokens=max_tokens, priority=priority, cache_salt=salt)
            with contextlib.suppress(CacheCapacityError):
                self.scheduler.add_request(request)
                self.added[name] = request

    @rule(repeat=st.integers(1, 6))
    def step(self, repeat):
        for _ in range(repeat):
            self.one_step()

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.requests)
    def abort_during_a_step(self, data):
        output = self.scheduler.schedule()
        name = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        sampled = self.compute(output)
        assert self.scheduler.abort(name).finish_reason == "abort"
        self.scheduler.update(output, sampled)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.running)
    def stop_one(self, data):
        output = self.scheduler.schedule()
        sampled = self.compute(output)
        if sampled:
            name = data.draw(st.sampled_from(sorted(sampled)))
            (done,) = [
                r for r in self.scheduler.update(output, sampled, {name: "stop"}) if r.request_id == name
            ]
            assert done.finish_reason == "stop"
        else:
            self.scheduler.update(output, sampled)

    @rule()
    def failed_step(self):
        self.scheduler.schedule()

    @rule()
    def reset_cache(self):
        assert self.kv.reset_prefix_cache() == (not self.scheduler.running)

    @invariant()
    def books_balance(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            self.windows_hold_no_more_than_they_need()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_unfinished:
                break
            self.one_step()
        assert not self.scheduler.has_unfinished, "requests starve"
        self.scheduler.check_integrity()
        assert self.kv.usage == 0.0
        assert self.scheduler.stats.num_finished == len(self.added)
        for request in self.added.values():
            self.check_output(request)

    def one_step(self):
        output = self.scheduler.schedule()
        assert output.total_num_tokens <= self.scheduler.max_num_batched_tokens
        assert output.total_num_tokens == sum(s.num_new_tokens for s in output.scheduled)
        assert bool(output.scheduled) == self.scheduler.has_unfinished
        self.scheduler.update(output, self.compute(output))

    def compute(self, output):
        """All writes of the step, then all reads, as a paged attention layer does it."""
        for item in output.scheduled:
            tokens = item.request.all_token_ids
            for group, table in enumerate(self.kv.block_ids(item.request.request_id)):
                for position in range(item.start, item.start + item.num_new_tokens):
                    self.slots[self.slot(group, table, position)] = (group, tuple(tokens[: position + 1]))
        for item in output.scheduled:
            self.check_reads(item)
        return {
            s.request.request_id: next_token(s.request.all_token_ids) for s in output.scheduled if s.samples
        }

    def slot(self, group, table, position):
        size = self.kv.groups[group].block_size
        assert table[position // size] != 0, "a needed position is in the null block"
        return table[position // size], position % size

    def check_reads(self, item):
        tokens = item.request.all_token_ids
        for group, table in enumerate(self.kv.block_ids(item.request.request_id)):
            width = getattr(self.kv.groups[group].spec, "window", MAX_MODEL_LEN)
            for position in range(max(0, item.start - width + 1), item.start + item.num_new_tokens):
                assert self.slots[self.slot(group, table, position)] == (group, tuple(tokens[: position + 1]))

    def windows_hold_no_more_than_they_need(self):
        for manager in self.kv.managers:
            for table in manager.tables.values():
                assert len(table.live_blocks) <= manager.max_blocks

    def check_output(self, request):
        assert request.is_finished
        tokens = list(request.prompt_token_ids)
        for token in request.output_token_ids:
            assert token == next_token(tokens)
            tokens.append(token)
        assert tokens == request.all_token_ids
        if request.finish_reason == "length":
            assert len(request.output_token_ids) == min(
                request.max_tokens, MAX_MODEL_LEN - request.num_prompt_tokens
            )


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(24))
def test_overload(seed):
    """More requests than the pool holds, for long enough that every mechanism is at work at once."""
    rng = random.Random(seed)
    machine = SchedulerMachine()
    layout, budget = LAYOUTS[seed % len(LAYOUTS)], rng.choice([4, 8, 24])
    one_request = sum(group.spec.max_blocks_per_request(MAX_MODEL_LEN, budget) for group in layout)
    machine.start(
        layout=layout,
        num_blocks=1 + one_request + rng.randint(0, 8),
        budget=budget,
        max_num_seqs=6,
        policy=rng.choice(["fcfs", "priority"]),
        threshold=rng.choice([0, 3]),
        watermark=rng.choice([0.0, 0.1]),
        caching=seed % 5 > 0,
    )
    for _ in range(25):
        prompt = TEXT[: rng.randint(0, 12)] + rng.choices([1, 2, 3], k=rng.randint(1, 5))
        machine.add([prompt, prompt], rng.randint(8, 30), rng.randint(0, 2), rng.choice([None, None, "s"]))
        for _ in range(rng.randint(1, 4)):
            machine.one_step()
            machine.books_balance()
        if rng.random() < 0.2 and machine.scheduler.requests:
            machine.scheduler.abort(rng.choice(sorted(machine.scheduler.requests)))
    machine.teardown()
    stats = machine.scheduler.stats
    if len(layout) > 1:
        assert stats.num_preemptions > 0
    if machine.kv.enable_caching:
        assert stats.prefix_hit_tokens > 0
