"""Drives a `KVCacheManager` as a scheduler does, at random, over a `SimulatedMemory`.

Everything the contract allows may happen between any two steps, with up to `depth` steps in flight. After every
operation the books must balance; every read of every step must find what it needs; every hit must be the longest
one; no request may hold more than its specs say; and a request that is alone must always get its blocks.
"""

from __future__ import annotations

import random
from collections import Counter, deque

from pagebinder.runtime.kv import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HostBlocks,
    KVCacheGroup,
    KVCacheManager,
    LatentSpec,
    RecurrentSpec,
    RingSpec,
    ShortConvSpec,
    SlidingWindowLatentSpec,
    SlidingWindowSpec,
)
from pagebinder.runtime.request import Request
from tests.runtime.kv.simulated_memory import SimulatedMemory, longest_resumable

MAX_MODEL_LEN = 48
MAX_ENCODER_TOKENS = 6
ROWS = {"num_kv_heads": 1, "head_dim": 4, "head_dim_v": 4, "dtype": "float32", "entry_bytes": 32}
STATE = {"shape": (4,), "dtype": "float32", "entry_bytes": 16}
TEXT = [1 + i * i % 3 for i in range(40)]


def _group(cls, **fields) -> KVCacheGroup:
    return KVCacheGroup(cls(**fields), (cls.kind,))


def full(block_size):
    return _group(FullAttentionSpec, block_size=block_size, **ROWS)


def latent(block_size):
    return _group(LatentSpec, block_size=block_size, **ROWS)


def window(tokens, block_size):
    return _group(SlidingWindowSpec, block_size=block_size, window=tokens, **ROWS)


def latent_window(tokens, block_size):
    return _group(SlidingWindowLatentSpec, block_size=block_size, window=tokens, **ROWS)


def chunked(tokens, block_size):
    return _group(ChunkedLocalSpec, block_size=block_size, chunk=tokens, **ROWS)


def recurrent(block_size):
    return _group(RecurrentSpec, block_size=block_size, **STATE)


def short_conv(block_size):
    return _group(ShortConvSpec, block_size=block_size, **STATE)


def ring(rows, resume_multiple):
    return _group(
        RingSpec, block_size=MAX_MODEL_LEN, rows=rows, resume_multiple=resume_multiple, dtype="float32",
        entry_bytes=16,
    )  # fmt: skip


def cross(block_size):
    return _group(CrossAttentionSpec, block_size=block_size, **ROWS)


def next_token(tokens):
    return 1 + sum(tokens) % 3


class CacheDriver:
    """`run(name, rng)` performs one operation of `OPERATIONS`; `drain()` brings every request to its end."""

    def __init__(
        self, layout, num_blocks, *, max_in_flight_tokens=12, host_slots=0, depth=1, **options
    ) -> None:
        self.kv = KVCacheManager(
            layout, num_blocks, max_model_len=MAX_MODEL_LEN, max_in_flight_tokens=max_in_flight_tokens * depth,
            max_encoder_tokens=MAX_ENCODER_TOKENS, host_blocks=HostBlocks(host_slots) if host_slots else None,
            **options,
        )  # fmt: skip
        self.memory = SimulatedMemory(self.kv)
        self.chunk, self.depth = max_in_flight_tokens, depth
        self.has_cross = any(isinstance(group.spec, CrossAttentionSpec) for group in layout)
        self.limit: dict[Request, int] = {}
        self.cache_at: dict[Request, int] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.swapped: list[tuple[Request, object]] = []
        self.in_flight: deque = deque()
        self.counts: Counter[str] = Counter()

    def run(self, name: str, rng: random.Random) -> None:
        getattr(self, name)(rng)
        self.counts[name] += 1
        self.check()

    # Operations

    def add(self, rng: random.Random) -> None:
        prompt = TEXT[: rng.randint(0, 36)] + rng.choices([1, 2, 3], k=rng.randint(1, 4))
        encoder = rng.choice([0, 0, 3, 6]) if self.has_cross else 0
        start = rng.randint(0, 6)
        request = Request(
            f"r{self.counts['requests']}", prompt, max_tokens=40, cache_salt=rng.choice([None, None, None, "s"]),
            adapter=rng.choice([None, None, None, "a"]), encoder_hash=bytes([encoder]) if encoder else None,
            num_encoder_tokens=encoder, media=rng.choice([(), (), (("cat", start, start + 3),)]),
        )  # fmt: skip
        self._enlist(request, rng, self.waiting)

    def step(self, rng: random.Random) -> None:
        for request in [r for r in self.running if self._is_done(r) and not self._is_in_flight(r)]:
            self._end(request)  # it was preempted after its last step
        items: list[tuple[Request, int, int]] = []
        busy: set[Request] = set()
        if rng.random() < 0.5:
            self._schedule_batch(items, busy, rng)
        for request in rng.sample([r for r in self.running if r not in busy], len(self.running) - len(busy)):
            if request in self.running and not self._is_done(request) and rng.random() < 0.85:
                self._schedule_running(request, items, busy, rng)
        for request, image in list(self.swapped):
            if rng.random() < 0.5:
                self._swap_in(request, image, rng)
        for request in list(self.waiting):
            if rng.random() < 0.5:
                self._admit(request, items, busy, rng)
        if not items and rng.random() < 0.8:
            return
        number = self.kv.step_started()
        if items and rng.random() < 0.1:  # it fails before it has done anything
            self.kv.step_finished(number)
            if rng.random() < 0.7:
                self._preempt(rng.choice(self.running), rng)
            return
        running_step = self.memory.run_step(items, number)
        for request, start, count in items:
            request.num_computed_tokens = start + count
            if start + count == request.num_tokens and request.num_tokens < self.limit[request]:
                request.append_output(next_token(request.all_token_ids))
        self.in_flight.append((running_step, items))
        while len(self.in_flight) >= self.depth:
            self.finish_step(rng)

    def finish_step(self, rng: random.Random) -> None:
        if not self.in_flight:
            return
        running_step, items = self.in_flight.popleft()
        self.memory.finish(running_step)
        self.kv.step_finished(running_step.number)
        for request, _, _ in items:
            if request not in self.running:
                continue
            if request.num_computed_tokens >= self.cache_at[request] or rng.random() < 0.1:
                (self.cache_at[request],) = self.kv.cache_batch([request], [request.num_computed_tokens])
                assert self.cache_at[request] == self.kv.next_cache_at(request)
                assert self.cache_at[request] > request.num_computed_tokens
            if self._is_done(request):
                self._end(request)

    def fork(self, rng: random.Random) -> None:
        parents = [
            r for r in self.running if r.num_computed_tokens and not self.kv.needs_encoder(r.request_id)
        ]
        if not parents:
            return
        parent = rng.choice(parents)
        computed = parent.num_computed_tokens
        own = rng.choices([1, 2, 3], k=rng.randint(1, 3))
        child = Request(
            f"r{self.counts['requests']}", parent.all_token_ids[:computed] + own, max_tokens=40,
            cache_salt=parent.cache_salt, adapter=parent.adapter, encoder_hash=parent.encoder_hash,
            num_encoder_tokens=parent.num_encoder_tokens, media=parent.media,
        )  # fmt: skip
        child.num_computed_tokens = computed
        free = self.kv.num_free_blocks
        if not self._enlist(child, rng, self.running):
            return
        self.kv.fork(parent, child)
        assert self.kv.num_free_blocks == free
        for request in (parent, child):
            assert self.kv.covered_tokens(request.request_id) == computed
            self.cache_at[request] = self.kv.next_cache_at(request)

    def finish(self, rng: random.Random) -> None:
        if self.running:
            self._end(rng.choice(self.running))

    def preempt(self, rng: random.Random) -> None:
        if self.running:
            self._preempt(rng.choice(self.running), rng)

    def abort_swapped(self, rng: random.Random) -> None:
        if self.swapped:
            request, image = self.swapped.pop(rng.randrange(len(self.swapped)))
            self.kv.drop_image(image)
            self.memory.forget(request)

    def reset(self, rng: random.Random) -> None:
        assert self.kv.reset_prefix_cache() == (self.kv.usage == 0.0)

    OPERATIONS = ("add", "step", "finish_step", "fork", "finish", "preempt", "abort_swapped", "reset")
    WEIGHTS = (5, 20, 2, 2, 1, 2, 1, 1)

    def drain(self) -> None:
        rng = random.Random(0)
        # Victims are chosen at random here, so a crowd in a small pool makes slow progress.
        for _ in range(2000 + 200 * len(self.waiting + self.running + self.swapped)):
            if not (self.waiting or self.running or self.swapped):
                break
            self.step(rng)
            self.finish_step(rng)
            self.check()
        assert not (self.waiting or self.running or self.swapped), "requests starve"
        while self.in_flight:
            self.finish_step(rng)
        self.step_of_nothing()
        assert self.kv.usage == 0.0 and self.kv.num_deferred_blocks == 0
        assert self.kv.reset_prefix_cache()
        self.kv.check_integrity()

    def step_of_nothing(self) -> None:
        """Copies whose requests have gone since are run (or dropped), and what they held goes back."""
        number = self.kv.step_started()
        self.memory.finish(self.memory.run_step([], number))
        self.kv.step_finished(number)

    # Inside

    def check(self) -> None:
        self.kv.check_integrity()
        assert len(self.kv.rows) == len(self.running)
        for manager in self.kv.managers:
            for request in self.running:
                live = manager.tables[request.request_id].live_blocks
                held = sum(not block.is_null for block in live)
                most = manager.max_admission_blocks(self.limit[request], request.num_encoder_tokens)
                assert held <= most <= manager.max_blocks

    def _enlist(self, request: Request, rng: random.Random, where: list[Request]) -> bool:
        self.limit[request] = limit = min(MAX_MODEL_LEN, request.num_tokens + rng.randint(1, 16))
        if request.num_tokens > limit:
            return False
        if self.kv.max_blocks_for(limit, request.num_encoder_tokens) > self.kv.num_usable_blocks:
            return False
        self.counts["requests"] += 1
        where.append(request)
        return True

    def _is_done(self, request: Request) -> bool:
        return request.num_computed_tokens >= self.limit[request]

    def _is_in_flight(self, request: Request) -> bool:
        return any(item[0] is request for _, items in self.in_flight for item in items)

    def _schedule_batch(self, items, busy, rng) -> None:
        """Some of the running requests together, mostly for one token; those that are refused stay for later."""
        chosen = [r for r in self.running if not self._is_done(r) and rng.random() < 0.6]
        if not chosen:
            return
        starts = [r.num_computed_tokens for r in chosen]
        lengths = [rng.choice([1, 1, 1, rng.randint(1, self.chunk)]) for _ in chosen]
        ends = [min(start + n, r.num_tokens) for r, start, n in zip(chosen, starts, lengths)]
        covered = self.kv.allocate_batch(chosen, starts, ends)
        self.counts["batched"] += len(covered)
        for request, start, end, tokens in zip(chosen, starts, ends, covered):
            assert tokens == self.kv.covered_tokens(request.request_id) >= start
            self.cache_at[request] = self.kv.next_cache_at(request)
            items.append((request, start, end - start))
            busy.add(request)

    def _schedule_running(self, request, items, busy, rng) -> None:
        start, request_id = request.num_computed_tokens, request.request_id
        count = min(request.num_tokens - start, rng.randint(1, self.chunk))
        assert count > 0
        if start + count > self.kv.covered_tokens(request_id) or rng.random() < 0.1:
            covered = self.kv.covered_tokens(request_id)
            while not self.kv.allocate_slots(request, count):
                assert self.kv.covered_tokens(request_id) == covered, "a refusal changes nothing"
                if not self._make_room(request, busy, rng):
                    return
            assert self.kv.covered_tokens(request_id) >= start
            self.cache_at[request] = self.kv.next_cache_at(request)
        else:
            self.counts["uncalled"] += 1
        items.append((request, start, count))
        busy.add(request)

    def _make_room(self, request: Request, busy: set[Request], rng: random.Random) -> bool:
        """Free something; False if the request itself had to go."""
        if self.in_flight and rng.random() < 0.5:
            self.finish_step(rng)
            return request in self.running
        victims = [r for r in self.running if r not in busy and r is not request]
        if victims:
            self._preempt(rng.choice(victims), rng)
            return True
        if self.in_flight:
            self.finish_step(rng)
            return request in self.running
        assert len(self.running) > 1, f"{request} is alone and gets no blocks"
        self._preempt(request, rng)
        return False

    def _admit(self, request: Request, items, busy, rng) -> None:
        kv = self.kv
        kv.extend_hashes(request)
        hit = kv.find_prefix(request)
        if kv.enable_caching:
            assert hit.num_tokens == longest_resumable(kv, request)
        may_grow = kv.prefix_may_grow(request, max(0, hit.num_tokens - kv.alignment))
        assert may_grow or hit.num_tokens == 0
        count = min(request.num_tokens - hit.num_tokens, rng.randint(1, self.chunk))
        free = kv.num_free_blocks
        alone = not self.running and not self.in_flight
        if not kv.allocate_slots(request, count, hit, full_sequence_must_fit=rng.random() < 0.5):
            assert kv.num_free_blocks == free and request.request_id not in kv.rows
            assert not alone, f"{request} is alone and cannot start"
            return
        self.counts["hit tokens"] += hit.num_tokens
        self.counts["partial hits"] += any(group.tail is not None for group in hit.groups)
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed_tokens = hit.num_tokens
        self.cache_at[request] = kv.next_cache_at(request)
        items.append((request, hit.num_tokens, count))
        busy.add(request)

    def _preempt(self, request: Request, rng: random.Random) -> None:
        image = self.kv.swap_out(request) if self.kv.swapper is not None and rng.random() < 0.6 else None
        self.running.remove(request)
        if image is not None:
            self.counts["swapped out"] += 1
            self.swapped.append((request, image))
            return
        self.kv.free(request)
        request.num_computed_tokens = 0
        self.waiting.append(request)

    def _swap_in(self, request: Request, image, rng: random.Random) -> None:
        if rng.random() < 0.1:
            self.kv.drop_image(image)
            request.num_computed_tokens = 0
            self.waiting.append(request)
        elif self.kv.swap_in(request, image):
            assert request.num_computed_tokens == image.num_computed_tokens
            self.cache_at[request] = self.kv.next_cache_at(request)
            self.running.append(request)
        else:
            return
        self.swapped.remove((request, image))

    def _end(self, request: Request) -> None:
        self.kv.free(request)
        self.running.remove(request)
        self.memory.forget(request)
