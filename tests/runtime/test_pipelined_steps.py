"""Steps that run long after they were scheduled, over the hash model: nothing they use may change in between.

schedule 1 -- schedule 2 ------- run 1 -- results of 1 -- schedule 3 ------- run 2 -- ...
                          ^ poison: every block that is free and holds nothing is overwritten

Requests that may go ahead compute in step 2 the token that step 1 chooses; the others sit step 2 out.
"""

import random

import pytest
import torch

from pagebinder.errors import CacheCapacityError
from pagebinder.runtime.arena import KVArena
from pagebinder.runtime.kv import KVCacheManager
from pagebinder.runtime.kv.host_blocks import HostBlocks
from pagebinder.runtime.live_requests import AHEAD
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler
from pagebinder.runtime.step_loop import awaited_places, awaited_sources
from pagebinder.runtime.step_plan import StepPlanner
from pagebinder.runtime.swap_policy import SwapPolicy
from tests.runtime.engine_harness import POISON
from tests.runtime.hash_model import hash_model
from tests.runtime.hash_oracle import EOS, VOCAB_SIZE, Oracle
from tests.runtime.test_engine_state_machine import MAX_MODEL_LEN, MIXES, NIGHTLY, TEXT

STEPS_IN_FLIGHT = 2


class Pipeline:
    """A scheduler whose steps wait in `queue` as (schedule, plan, swaps, copies) until `complete` runs the oldest."""

    def __init__(self, groups, rng):
        self.model = hash_model(groups, MAX_MODEL_LEN)
        budget, plan = rng.choice([4, 16]), self.model.kv_plan
        one_request = plan.min_blocks(MAX_MODEL_LEN, STEPS_IN_FLIGHT * budget)
        num_blocks = one_request + rng.randint(0, one_request)
        self.arena = KVArena(plan, self.model.states, num_blocks, torch.device("cpu"))
        self.arena.add_host_blocks(2 * one_request)
        self.kv = KVCacheManager(
            plan.groups, num_blocks, max_model_len=MAX_MODEL_LEN, max_in_flight_tokens=STEPS_IN_FLIGHT * budget,
            host_blocks=HostBlocks(2 * one_request),
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=6, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN,
            max_steps_in_flight=STEPS_IN_FLIGHT, ahead_flags=AHEAD,
            swap_policy=SwapPolicy(rng.choice(["always", "never"]), plan.bytes_per_block),
        )  # fmt: skip
        self.planner = StepPlanner(
            plan.groups, self.kv.tables, torch.device("cpu"), max_steps_in_flight=STEPS_IN_FLIGHT
        )
        self.memory = self.arena.memory.view(num_blocks, -1)
        self.memory.fill_(POISON)
        self.queue = []
        self.oracles = {}
        self.most_in_flight = self.num_awaited = self.num_overshot = 0
        self.chosen = None  # the step that ran last, and its tokens

    def add(self, name, prompt, max_tokens, flags=0):
        request = Request(name, prompt, max_tokens=max_tokens)
        request.flags = flags
        try:
            self.scheduler.add_request(request)
        except CacheCapacityError:
            return
        self.oracles[name] = Oracle(self.model.states, prompt)

    def fork(self, name, child_name):
        parent = self.scheduler.requests[name]
        if parent.num_output_tokens:
            child = parent.child(child_name, parent.num_tokens, max_tokens=MAX_MODEL_LEN)
            self.oracles[child_name] = self.oracles[name].copy()
            self.scheduler.fork(name, child)

    def schedule(self):
        if len(self.queue) < STEPS_IN_FLIGHT:
            output = self.scheduler.schedule()
            if output.step is not None:
                plan = self.planner.build(output)
                self.queue.append((output, plan, self.kv.take_swaps(), self.kv.take_copies()))
        self.most_in_flight = max(self.most_in_flight, len(self.queue))
        self.check()

    def run(self, output, plan, swaps, copies):
        """Tokens of a step, whose awaited ids the step before has chosen by now."""
        self.arena.swap_blocks(swaps)
        self.arena.copy_blocks(copies)
        if len(output.awaited):
            before, tokens = self.chosen
            sources = awaited_sources(output, before)
            plan.tensors["input_ids"][awaited_places(output)] = torch.tensor(tokens)[sources]
        tokens = self.model.executable.run({**plan.tensors, **self.arena.caches}).argmax(-1).tolist()
        self.chosen = output, tokens
        return tokens

    def complete(self):
        """Run the oldest step and take its results; every token must be the oracle's."""
        if not self.queue:
            return
        output, *work = self.queue.pop(0)
        tokens = self.run(output, *work)
        self.num_awaited += len(output.awaited)
        self.num_overshot += sum(output.requests[row].is_finished for row in output.awaited.tolist())
        for request_id, token in zip(output.sampling_ids, tokens, strict=True):
            # Those that were aborted meanwhile count too: their blocks must not be handed out before.
            assert token == int(self.oracles[request_id].logits.argmax()), f"{request_id} took a wrong turn"
            self.oracles[request_id].feed(token)
        ended = {i: "stop" for i, token in zip(output.sampling_ids, tokens) if token == EOS}
        self.scheduler.update(output, tokens, {i: "stop" for i in ended if i in self.scheduler.requests})
        self.check()

    def discard(self):
        """The steps in flight run, but their results are lost."""
        for work in self.queue:
            self.run(*work)
        self.queue.clear()
        self.scheduler.discard()
        self.check()

    def check(self):
        self.scheduler.check_integrity()
        assert (self.memory[0] == POISON).all(), "the null block was written"
        # What a waiting step saves to the host first may be handed out to that step already.
        saved = {copy.block for _, _, swaps, _ in self.queue for copy in swaps if copy.to_host}
        free = [b for b in self.kv.pool.free_queue.get_all_free_blocks() if b.block_id not in saved]
        self.memory[[b.block_id for b in free if b.block_hash is None and not b.inner_hashes]] = POISON

    def drain(self):
        for _ in range(5000):
            if not self.scheduler.has_unfinished:
                break
            self.schedule()
            self.complete()
        assert not self.scheduler.has_unfinished, "requests starve"
        while self.queue:  # steps of requests that were aborted
            self.complete()
        self.check()
        assert (self.kv.usage, self.kv.num_deferred_blocks) == (0.0, 0)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(20 if NIGHTLY else 1))
def test_steps_use_what_they_were_scheduled_with(mix, seed):
    rng = random.Random(seed)
    pipeline = Pipeline(MIXES[mix], rng)
    requests = pipeline.scheduler.requests
    for number in range(60):
        if len(requests) < 12:
            prompt = TEXT[: rng.randint(0, 24)] + rng.choices(range(1, VOCAB_SIZE), k=rng.randint(1, 5))
            pipeline.add(f"r{number}", prompt, rng.randint(4, 24), rng.choice([0, AHEAD]))
        for _ in range(rng.randint(1, 4)):
            rng.choice([pipeline.schedule, pipeline.schedule, pipeline.complete])()
        if requests and rng.random() < 0.2:
            pipeline.fork(rng.choice(sorted(requests)), f"f{number}")
        if requests and rng.random() < 0.1:
            pipeline.scheduler.abort(rng.choice(sorted(requests)))
        if rng.random() < 0.1:
            pipeline.discard()
    pipeline.drain()
    assert pipeline.most_in_flight == STEPS_IN_FLIGHT
    assert pipeline.num_awaited > pipeline.num_overshot
