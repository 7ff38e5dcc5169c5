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
from pagebinder.runtime.kv.host_blocks import HostBlocks
from pagebinder.runtime.kv.retention import PrefixRetention
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler
from pagebinder.runtime.swap_policy import SwapPolicy
from tests.helpers import NIGHTLY, by_day

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


RETENTION = {
    "dense": PrefixRetention.dense(),
    "sparse": PrefixRetention.sparse(),
    "8": PrefixRetention.sparse(8),
}


def next_token(tokens):
    return 1 + sum(tokens) % 3


class Wavering(SwapPolicy):
    """Swaps now and then, and does not stick to it."""

    def __init__(self):
        super().__init__("auto", 1)
        self.rng = random.Random(0)

    def prefers_swap_out(self, kv, request):
        return self.rng.random() < 0.7

    def prefers_swap_in(self, image, num_tokens, num_hit_tokens):
        return self.rng.random() < 0.7


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        num_blocks=st.integers(8, 24),
        budget=st.integers(2, 24),
        max_num_seqs=st.integers(1, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 3]),
        mixed=st.sampled_from([0, 2, 5]),
        watermark=st.sampled_from([0.0, 0.2]),
        caching=st.booleans() | st.just(True),
        retention=st.sampled_from(sorted(RETENTION)),
        host_blocks=st.sampled_from([0, 4, 30]),
    )
    def start(
        self, layout, num_blocks, budget, max_num_seqs, policy, threshold, mixed, watermark, caching, retention,
        host_blocks,
    ):  # fmt: skip
        self.kv = KVCacheManager(
            layout,
            num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_in_flight_tokens=budget,
            enable_caching=caching,
            retention=RETENTION[retention],
            host_blocks=HostBlocks(host_blocks) if host_blocks else None,
        )
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN,
            policy=policy, long_prefill_token_threshold=threshold, mixed_prefill_tokens=mixed, watermark=watermark,
            swap_policy=Wavering() if host_blocks else None,
        )  # fmt: skip
        self.slots = {}
        self.host = {}
        self.added = {}
        self.num_offered = 0
        # Requests that were forked with another token than the model's own: at which output token.
        self.forced = {}

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

    def child_of(self, parent, other_token, max_tokens):
        """A copy of a request, whose last output token is replaced by `other_token` (None: it stays)."""
        name = f"r{self.num_offered}"
        self.num_offered += 1
        replaced = other_token is not None and parent.num_output_tokens > 0
        child = parent.child(name, parent.num_tokens - replaced, max_tokens=max_tokens)
        self.forced[name] = list(self.forced.get(parent.request_id, ()))
        if replaced:
            self.forced[name].append(child.num_output_tokens)
            child.append_output(other_token)
        self.added[name] = child
        return child

    def may_be_forked(self, parent, max_tokens):
        with contextlib.suppress(CacheCapacityError):
            self.scheduler.check_fits(parent.num_prompt_tokens, max_tokens)
            return True
        return False

    @rule(data=st.data(), other=st.sampled_from([None, 1, 2, 3]), max_tokens=st.integers(1, 30))
    @precondition(lambda self: self.scheduler.requests)
    def fork(self, data, other, max_tokens):
        parent = self.scheduler.requests[data.draw(st.sampled_from(sorted(self.scheduler.requests)))]
        if self.may_be_forked(parent, max_tokens):
            self.scheduler.discard()
            self.scheduler.fork(parent.request_id, self.child_of(parent, other, max_tokens))

    @rule(data=st.data(), others=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    @precondition(lambda self: self.scheduler.running)
    def fork_with_the_results(self, data, others):
        """n samples of one row of logits: the forks get tokens of their own."""
        output = self.scheduler.schedule()
        sampled = self.compute(output)
        forks = []
        if sampled:
            name = data.draw(st.sampled_from(sorted(sampled)))
            parent = self.scheduler.requests[name]
            for token in others:
                child = self.child_of(parent, None, parent.max_tokens)
                self.forced[child.request_id].append(child.num_output_tokens)
                child.append_output(token)
                forks.append((name, child))
        self.scheduler.update(output, sampled, forks=forks)

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
        """Copies, then all writes of the step, then all reads, as a paged attention layer does it."""
        self.copy_blocks()
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

    def copy_blocks(self):
        for copy in self.kv.take_swaps():
            if copy.to_host:
                self.host[copy.slot] = self.contents(copy.block)
            else:
                self.overwrite(copy.block, self.host[copy.slot])
        for copy in self.kv.take_copies():
            self.overwrite(copy.dst, self.contents(copy.src))

    def contents(self, block):
        return {i: self.slots[block, i] for i in range(8) if (block, i) in self.slots}

    def overwrite(self, block, contents):
        for i in range(8):
            self.slots.pop((block, i), None)
        self.slots.update({(block, i): written for i, written in contents.items()})

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
        for i, token in enumerate(request.output_token_ids):
            assert token == next_token(tokens) or i in self.forced.get(request.request_id, ())
            tokens.append(token)
        assert tokens == request.all_token_ids
        if request.finish_reason == "length":
            most = min(request.max_tokens, MAX_MODEL_LEN - request.num_prompt_tokens)
            # A fork of a longer request may start beyond its own limit.
            assert len(request.output_token_ids) == most or (
                len(request.output_token_ids) > most and request.request_id in self.forced
            )


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200 if NIGHTLY else 100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", by_day(range(24), range(12)))
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
        mixed=rng.choice([0, 2, 5]),
        watermark=rng.choice([0.0, 0.1]),
        caching=seed % 5 > 0,
        retention=rng.choice(sorted(RETENTION)),
        host_blocks=rng.choice([0, 6, 40]),
    )
    for _ in range(25):
        prompt = TEXT[: rng.randint(0, 12)] + rng.choices([1, 2, 3], k=rng.randint(1, 5))
        machine.add([prompt, prompt], rng.randint(8, 30), rng.randint(0, 2), rng.choice([None, None, "s"]))
        for _ in range(rng.randint(1, 4)):
            machine.one_step()
            machine.books_balance()
        if rng.random() < 0.3 and machine.scheduler.running:
            parent = rng.choice(machine.scheduler.running)
            child = machine.child_of(parent, rng.choice([None, 1, 2]), parent.max_tokens)
            machine.scheduler.fork(parent.request_id, child)
        if rng.random() < 0.2 and machine.scheduler.requests:
            machine.scheduler.abort(rng.choice(sorted(machine.scheduler.requests)))
    machine.teardown()
    stats = machine.scheduler.stats
    if len(layout) > 1:
        assert stats.num_preemptions > 0
    assert stats.num_forks > 0
    if machine.kv.swapper is not None and machine.kv.swapper.host.num_slots > 6 < stats.num_preemptions:
        assert stats.num_swaps_out >= stats.num_swaps_in > 0
    if machine.kv.enable_caching:
        assert stats.prefix_hit_tokens > 0
