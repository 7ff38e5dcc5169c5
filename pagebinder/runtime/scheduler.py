"""Which requests compute how many tokens in the next step.

    token budget   |= A: 1 =|= B: 1 =|= C: 512 (chunk of its prompt) =|= D: 300 =|      no phases:
                    RUNNING, best first ------------------------------ WAITING           every step is mixed

A request only has known tokens and computed tokens; scheduling it means computing some of the difference. A
decode has one token to compute, a prompt many, a preempted request its prompt and what it generated.

Running requests are kept best first (first come, or priority and then first come). When blocks run out the
worst running request is preempted: it gives back its blocks, goes to the head of the waiting line and is
recomputed later, mostly from the prefix cache. The best one always gets its blocks, so the engine always
advances, and `add_request` refuses what could not run even alone.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Mapping

from pagebinder.errors import ConfigError, RequestError
from pagebinder.runtime.admission import AdmissionMemo, check_fits
from pagebinder.runtime.kv.blocks import require
from pagebinder.runtime.kv.coordinator import KVCacheManager
from pagebinder.runtime.request import Request, RequestStatus
from pagebinder.runtime.scheduler_output import ScheduledRequest, SchedulerOutput, SchedulerStats
from pagebinder.runtime.waiting_queue import WaitingQueue

POLICIES = ("fcfs", "priority")


class Scheduler:
    """Continuous batching over one `KVCacheManager`. Not thread safe.

    Call `schedule()`, compute, then `update()` with the results. If computing failed, leave `update` out: the
    next `schedule()` asks for those tokens again.
    `policy`: "fcfs" or "priority" (lower `Request.priority` first). `long_prefill_token_threshold`: longest
    chunk of one request while others want tokens too (0: no limit; never less than an equal share).
    `watermark`: share of blocks kept free when a request is admitted beside running ones.
    Raises ConfigError for sizes that contradict each other.
    """

    def __init__(
        self, kv: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
        policy: str = "fcfs", long_prefill_token_threshold: int = 0, watermark: float = 0.0,
    ) -> None:  # fmt: skip
        if policy not in POLICIES:
            raise ConfigError(f"scheduling policy {policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ConfigError("max_num_seqs and max_num_batched_tokens must be at least 1")
        if max_num_batched_tokens > kv.max_in_flight_tokens or max_model_len > kv.max_model_len:
            raise ConfigError(
                f"the KV cache was planned for steps of {kv.max_in_flight_tokens} tokens and contexts of "
                f"{kv.max_model_len}, but the scheduler is to use {max_num_batched_tokens} "
                f"(max_num_batched_tokens) and {max_model_len} (max_model_len); plan it for these"
            )
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.watermark_blocks = int(watermark * kv.pool.num_blocks)
        self.stats = SchedulerStats()
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self._memo = AdmissionMemo(kv)
        self._arrivals = itertools.count()

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise RequestError or CacheCapacityError unless a request of this size can run when it is alone."""
        check_fits(self.kv, self.max_model_len, prompt_len, max_tokens)

    def add_request(self, request: Request) -> None:
        """Put a new request in line. Raises RequestError for an id in use, and what `check_fits` raises."""
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is already in use; choose another")
        self.check_fits(request.num_tokens, request.max_tokens)
        request.arrival = next(self._arrivals)
        self.kv.extend_hashes(request)
        self.requests[request.request_id] = request
        self.waiting.push(self._key(request), request)

    def abort(self, request_id: str) -> Request | None:
        """Finish a request with reason "abort" and free its blocks. None if it is unknown or finished.

        Allowed between `schedule` and `update`: blocks are not handed out again before the next `schedule`.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        self._finish(request, RequestStatus.FINISHED_ABORTED)
        return request

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and allocate their blocks. Empty if there are no requests."""
        scheduled: list[ScheduledRequest] = []
        preempted: list[str] = []
        budget = self._schedule_running(scheduled, preempted)
        if not preempted:
            budget = self._schedule_waiting(scheduled, budget)
        total = self.max_num_batched_tokens - budget
        if total == 0 and self.requests:
            raise RuntimeError(f"nobody can advance: {self.num_running} running, {self.num_waiting} waiting")
        self.stats.num_steps += 1
        self.stats.num_scheduled_tokens += total
        return SchedulerOutput(tuple(scheduled), tuple(preempted), total)

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, int], finished: Mapping[str, str] | None = None
    ) -> list[Request]:
        """Take a computed step's results; returns the requests that are finished now.

        `sampled`: request id -> token, for every scheduled request that samples. `finished`: request id ->
        "stop", "length", "abort" or "error", as the engine decided; a request that has reached max_tokens or
        max_model_len is finished with "length" in any case. Requests aborted meanwhile are skipped.
        Raises ValueError, with nothing changed, for a missing token, an unknown reason or an old `output`.
        """
        ends = {i: RequestStatus.from_finish_reason(reason) for i, reason in (finished or {}).items()}
        live = [s for s in output.scheduled if not s.request.is_finished]
        known = sampled.keys() | ends.keys()
        if missing := [s.request.request_id for s in live if s.samples and s.request.request_id not in known]:
            raise ValueError(f"no sampled token for {', '.join(missing)}")
        if any(s.start != s.request.num_computed_tokens for s in live):
            raise ValueError("this step's results were given already, or another step was scheduled since")
        for item in live:
            self._advance(item, sampled.get(item.request.request_id))
            if self._is_full(item.request):
                ends.setdefault(item.request.request_id, RequestStatus.FINISHED_LENGTH)
        done = [self.requests[i] for i in ends if i in self.requests]
        for request in done:
            self._finish(request, ends[request.request_id])
        if done:
            self.running = [request for request in self.running if not request.is_finished]
        return done

    def check_integrity(self) -> None:
        """Raise KVCacheIntegrityError if blocks are miscounted or a request is out of place. O(blocks)."""
        self.kv.check_integrity()
        holders = set().union(*(manager.tables for manager in self.kv.managers))
        running = {request.request_id for request in self.running}
        require(holders == running, f"{sorted(running)} run, but {sorted(holders)} hold blocks")
        waiting = {request.request_id for request in self.waiting.requests()}
        require(not waiting & running, f"both running and waiting: {sorted(waiting & running)}")
        require(waiting | running == self.requests.keys(), "a request is neither running nor waiting")

    def _key(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.policy == "priority" else 0, request.arrival)

    def _chunk_limit(self) -> int:
        eligible = min(len(self.requests), self.max_num_seqs)
        if not self.long_prefill_token_threshold or eligible < 2:
            return self.max_num_batched_tokens
        return max(self.long_prefill_token_threshold, self.max_num_batched_tokens // eligible)

    def _schedule_running(self, scheduled: list[ScheduledRequest], preempted: list[str]) -> int:
        """Schedule running requests, best first, preempting from the other end. Returns the budget left."""
        budget, limit = self.max_num_batched_tokens, self._chunk_limit()
        # The list shrinks from its end while this walks it, so a victim is never scheduled already.
        while budget and len(scheduled) < len(self.running):
            request = self.running[len(scheduled)]
            count = min(request.num_tokens - request.num_computed_tokens, limit, budget)
            while not self.kv.allocate_slots(request, count):
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is request:
                    break
            else:
                scheduled.append(self._item(request, count))
                budget -= count
        return budget

    def _schedule_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        limit = self._chunk_limit()
        while budget and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            # Beside running requests only: a request that is alone must be tried, it is known to fit.
            if request is None or (self.running and self._memo.still_refused(request)):
                break
            hit = self.kv.find_prefix(request)
            count = min(request.num_tokens - hit.num_tokens, limit, budget)
            watermark = self.watermark_blocks if self.running else 0
            if not self.kv.allocate_slots(
                request, count, hit, full_sequence_must_fit=True, watermark_blocks=watermark
            ):
                self._memo.refuse(request, hit.num_tokens)
                break
            self.waiting.pop()
            self._memo.clear()
            self._admit(request, hit.num_tokens)
            scheduled.append(self._item(request, count))
            budget -= count
        return budget

    def _admit(self, request: Request, num_hit_tokens: int) -> None:
        if request.status is RequestStatus.WAITING:
            self.stats.prefix_queried_tokens += request.num_tokens
            self.stats.prefix_hit_tokens += num_hit_tokens
            request.num_cached_tokens = num_hit_tokens
        else:
            self.stats.resumed_hit_tokens += num_hit_tokens
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        insort(self.running, request, key=self._key)

    def _preempt(self, request: Request) -> None:
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push(self._key(request), request)

    def _advance(self, item: ScheduledRequest, token: int | None) -> None:
        request = item.request
        request.num_computed_tokens += item.num_new_tokens
        if item.samples and token is not None:
            request.append_output(token)
            self.kv.extend_hashes(request)
        self.kv.cache_blocks(request)

    def _is_full(self, request: Request) -> bool:
        return request.num_output_tokens >= request.max_tokens or request.num_tokens >= self.max_model_len

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        self.kv.free(request)
        del self.requests[request.request_id]
        self.stats.num_finished += 1

    @staticmethod
    def _item(request: Request, count: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        return ScheduledRequest(request, start, count, start + count == request.num_tokens)
