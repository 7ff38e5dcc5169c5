"""Drives an engine over the hash model and knows what every request must answer.

    add, step, abort, fork, ...  -->  Engine(hash_model)  -->  outputs
                                          |                       |
                            books, null block, poison      Oracle: each new token from the tokens alone,
                                                           as an engine without cache and memory limit would

What is checked after every operation: the books balance, the null block was not written, and no hit is longer than
what some other request with the same salt has in common with this one. Blocks that hold nothing are overwritten, so
whoever still reads one gets another token.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch

from pagebinder.config import EngineConfig, SamplingParams
from pagebinder.errors import CacheCapacityError
from pagebinder.runtime.engine import Engine
from pagebinder.runtime.executables import Executable
from pagebinder.runtime.outputs import RequestOutput
from pagebinder.runtime.sampler import SamplingRow, draw
from pagebinder.runtime.speculation import DraftRequest
from pagebinder.runtime.swap_policy import Rate, SwapPolicy
from tests.runtime.hash_model import HashGroup, hash_model
from tests.runtime.hash_oracle import EOS, VOCAB_SIZE, Oracle
from tests.runtime.tracked_requests import KnownTexts, Node, Tracked

POISON = 0xA5


class InjectedError(Exception):
    """Raised by a model that was told to fail."""


class FaultyExecutable:
    """An executable that raises when `fail` is "before" (nothing was computed) or "after" (all was written)."""

    name = "faulty"

    def __init__(self, inner: Executable) -> None:
        self.inner = inner
        self.fail: str | None = None

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.fail == "before":
            raise InjectedError
        logits = self.inner.run(inputs)
        if self.fail == "after":
            raise InjectedError
        return logits


def fix_rates(policy: SwapPolicy) -> None:
    """Copying a block takes as long as computing a token, whatever the clock says: runs must be repeatable."""
    policy.copy_rate, policy.compute_rate = Rate(), Rate()
    policy.copy_rate.add(policy.bytes_per_block, 1.0)
    policy.compute_rate.add(1, 1.0)
    policy.note_copy = policy.note_prefill = lambda amount, seconds: None


class OracleDrafter:
    """Guesses what the oracle knows, and now and then something else. `of`: the harness whose requests it is asked
    for."""

    def __init__(self, seed: int) -> None:
        self.of: EngineHarness | None = None
        self._rng = random.Random(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._one(request) for request in requests]

    def forget(self, key: str) -> None:
        pass

    def _one(self, asked: DraftRequest) -> list[int]:
        request, rng = self.of.live.get(asked.request_id), self._rng
        if request is None or asked.token_ids != request.prompt + request.tokens:  # not all is delivered yet
            return rng.choices(range(VOCAB_SIZE), k=rng.randint(0, asked.most))
        guesses, oracle = [], request.oracle.copy()
        for i in range(rng.choice([0, 1, asked.most, asked.most])):
            known = request.prompt + request.tokens + guesses
            row = SamplingRow(request.params, request.seed, known, len(request.tokens) + i)
            guesses.append(int(draw(oracle.logits[None], [0], [row])[0]))
            oracle.feed(guesses[-1])
        if guesses and rng.random() < 0.4:
            guesses[rng.randrange(len(guesses))] = rng.randrange(VOCAB_SIZE)
        return guesses


class EngineHarness:
    """One engine and its requests. `counts` says what happened, so that a test can ask for it."""

    def __init__(
        self, groups: Sequence[HashGroup], *, max_model_len: int, num_host_blocks: int = 0, **config
    ) -> None:
        model = hash_model(groups, max_model_len)
        swap_bytes = num_host_blocks * model.kv_plan.bytes_per_block
        self.executable = FaultyExecutable(model.executable)
        self.model = replace(model, executable=self.executable)
        self.engine = Engine(self.model, EngineConfig(swap_bytes=swap_bytes, **config))
        self.is_async = self.engine.config.async_stepping == "on"
        if isinstance(self.engine.config.drafter, OracleDrafter):
            self.engine.config.drafter.of = self
        if self.engine.swap_policy is not None:
            fix_rates(self.engine.swap_policy)
        self.live: dict[str, Tracked] = {}
        self.texts: dict[str | None, KnownTexts] = defaultdict(KnownTexts)
        self.finished: list[Tracked] = []
        self.counts: Counter[str] = Counter()
        self.num_added = 0
        self.memory = self.engine.arena.memory.view(self.engine.arena.num_blocks, -1)
        self.memory.fill_(POISON)
        self.null_block = self.memory[0].clone()

    # Operations

    def add(
        self, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0, salt: str | None = None
    ) -> list[str]:
        """Queue a prompt; returns the ids it became, none if it can never fit."""
        name = f"r{self.num_added}"
        self.num_added += 1
        try:
            ids = self.engine.add_request(name, list(prompt), params, priority=priority, cache_salt=salt)
        except CacheCapacityError:
            self.counts["too large"] += 1
            return []
        for i, request_id in enumerate(ids):
            self._track(
                request_id, list(prompt), params, params.seed + i, salt, Oracle(self.model.states, prompt)
            )
        return ids

    def fork(self, request_id: str, params: SamplingParams) -> None:
        """Continue a request a second time, if the new one has a token to generate."""
        parent, params = self.live[request_id], replace(params, n=1)
        room = self.model.max_model_len - len(parent.prompt)
        if min(params.max_tokens or room, room) <= len(parent.tokens):
            return
        name = f"{request_id}+{self.num_added}"
        self.num_added += 1
        self.engine.fork(request_id, name, params)
        child = self._track(name, parent.prompt, params, params.seed, parent.salt, parent.oracle.copy())
        child.is_alone = False
        for token in parent.tokens:
            child.tokens.append(token)
            child.node = child.node.add(token)
        self.check()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """A whole call besides the requests that are there already."""
        params = replace(params, n=1)
        room = self.model.max_model_len
        outputs = self.engine.generate([list(p) for p in prompts], params)
        for output, prompt in zip(outputs, prompts, strict=True):
            limit = room - len(prompt)
            request = Tracked(
                "", list(prompt), [], params, params.seed, None, Oracle(self.model.states, prompt), Node(),
                min(params.max_tokens or limit, limit), False,
            )  # fmt: skip
            while request.finish_reason is None:
                request.append(self._next_tokens([request])[0])
            assert (output.token_ids, output.finish_reason) == (request.tokens, request.finish_reason)
            self._remember(prompt, None)
        self.counts["calls"] += 1
        self.step()  # also hands over what the other requests got meanwhile

    def beam_search(self, prompt: Sequence[int], width: int, max_tokens: int) -> None:
        """A beam search besides the requests that are there already; its scores must be its tokens' own."""
        beams = self.engine.beam_search(list(prompt), beam_width=width, max_tokens=max_tokens)
        assert 1 <= len(beams) <= width
        assert len({tuple(beam.token_ids) for beam in beams}) == len(beams)
        assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
        start = Oracle(self.model.states, prompt)
        for beam in beams:
            oracle, logprob = start.copy(), 0.0
            for token in beam.token_ids:
                logprob += float(oracle.logits.log_softmax(-1)[token])
                oracle.feed(token)
            assert abs(logprob - beam.logprob) < 1e-3, "a beam lost its way"
            assert beam.finished == (beam.token_ids[-1] == EOS)
        self._remember(prompt, None)
        self.counts["beam searches"] += 1
        self.step()

    def next_turn(self, request: Tracked, more: Sequence[int], params: SamplingParams) -> list[str]:
        """Queue a finished request's whole text with `more` behind it, if the model is long enough."""
        text = request.prompt + request.tokens + list(more)
        return self.add(text, params, salt=request.salt) if len(text) < self.model.max_model_len else []

    def step(self) -> None:
        """One engine step; every output must be what the oracle says."""
        outputs = self.engine.step()
        self.counts["steps"] += 1
        self._check_outputs(outputs)
        self.check()

    def failing_step(self, when: str) -> None:
        """A step in which the model raises "before" or "after" it wrote its caches, or which fails "early", with its
        copies still to be made."""
        if not self.live:
            return
        self.executable.fail = when
        early = patch.object(self.engine.loop, "_copy_blocks", side_effect=InjectedError)
        outputs = []
        try:
            with early if when == "early" else nullcontext():
                outputs = self.engine.step()
        except InjectedError:
            self.counts["failed steps"] += 1
            self.counts["delayed copies"] += len(self.engine.kv.context.copies)
        else:
            # It may have taken the results of a step that was launched ahead, with nothing more to launch.
            assert self.is_async, "a step with unfinished requests did not run the model"
        finally:
            self.executable.fail = None
        self._check_outputs(outputs)
        self.check()

    def abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        request = self.live.pop(request_id)
        assert output.finished and output.finish_reason == "abort"
        assert output.token_ids == request.tokens
        self.counts["aborts"] += 1
        self.check()

    def reset_prefix_cache(self) -> None:
        done = self.engine.reset_prefix_cache()
        # A step in flight may hold what a request has left behind.
        assert done == (self.engine.stats().running == 0) or (self.is_async and not done)
        self.counts["resets" if done else "refused resets"] += 1
        self.check()

    def drain(self) -> None:
        """Run to the end: nobody starves, nothing is lost, all blocks are free again."""
        # The best running request advances in every step and keeps its blocks: it ends within max_model_len steps,
        # unless a better one enters. That was the best of all that waited, so nobody overtakes it in turn.
        patience = 2 * self.model.max_model_len
        num_live, idle = len(self.live), 0
        while self.live:
            self.step()
            idle = idle + 1 if len(self.live) == num_live else 0
            num_live = len(self.live)
            assert idle < patience, "requests starve"
        assert not self.engine.has_unfinished
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
        assert stats.free_blocks == stats.num_blocks - 1
        assert stats.free_host_blocks == stats.host_blocks
        names = ("preemptions", "prefix_hit_tokens", "forks", "copies", "swaps_out", "swaps_in")
        for name in (*names, "ahead_steps", "overshot_tokens", "drafted_tokens", "accepted_tokens"):
            self.counts[name] += getattr(stats, name)
        self.counts["waited_steps"] += sum(stats.waited_steps.values())

    # Checks

    def check(self) -> None:
        """The books balance and the null block is what it was; then overwrite all blocks that hold nothing."""
        self.counts["operations"] += 1
        self.engine.check_integrity()
        assert torch.equal(self.memory[0], self.null_block), "the null block was written"
        kv = self.engine.kv
        saved = kv.context.copies.blocks_to_save  # a step that failed early has left them to the next one
        worthless = [
            block.block_id
            for block in kv.pool.free_queue.get_all_free_blocks()
            if block.block_hash is None and not block.inner_hashes and block.block_id not in saved
        ]
        self.memory[worthless] = POISON

    def _check_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Whole calls in between leave several outputs of a request; each has one token more, or several where
        guesses stood."""
        while outputs:
            ids = [output.request_id for output in outputs]
            count = next((i for i, name in enumerate(ids) if name in ids[:i]), len(ids))
            requests = [self.live[name] for name in ids[:count]]
            for output, request, token in zip(outputs, requests, self._next_tokens(requests)):
                self._check_output(output, request, token)
            outputs = outputs[count:]

    def _check_output(self, output: RequestOutput, request: Tracked, token: int) -> None:
        if self.engine.config.drafter is None:
            assert len(output.token_ids) == len(request.tokens) + 1
        if not request.tokens and request.is_alone:
            self._check_hit(output, request)
        request.append(token)
        while len(request.tokens) < len(output.token_ids):
            assert request.finish_reason is None, f"{request.request_id} went on"
            request.append(self._next_tokens([request])[0])
        assert output.token_ids == request.tokens, f"{request.request_id} took a wrong turn"
        assert output.finish_reason == request.finish_reason
        assert output.finished == (request.finish_reason is not None)
        if output.finished:
            self.finished.append(self.live.pop(request.request_id))

    @staticmethod
    def _next_tokens(requests: Sequence[Tracked]) -> list[int]:
        if not requests:
            return []
        rows = [SamplingRow(r.params, r.seed, r.prompt + r.tokens, len(r.tokens)) for r in requests]
        logits = torch.stack([r.oracle.logits for r in requests])
        return draw(logits, range(len(rows)), rows).tolist()

    def _check_hit(self, output: RequestOutput, request: Tracked) -> None:
        limit = min(self.texts[request.salt].common_prefix(request.prompt), len(request.prompt) - 1)
        if not self.engine.config.prefix_caching:
            limit = 0
        assert output.num_cached_tokens <= limit, "a hit in tokens that nobody computed under this salt"

    def _remember(self, tokens: Sequence[int], salt: str | None) -> Node:
        node = self.texts[salt].root
        for token in tokens:
            node = node.add(token)
        return node

    def _track(
        self, request_id: str, prompt: list[int], params: SamplingParams, seed: int, salt, oracle
    ) -> Tracked:
        node, room = self._remember(prompt, salt), self.model.max_model_len - len(prompt)
        request = self.live[request_id] = Tracked(
            request_id, prompt, [], params, seed, salt, oracle, node, min(params.max_tokens or room, room),
            params.n == 1,
        )  # fmt: skip
        return request
