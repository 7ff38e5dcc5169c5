"""Which requests compute how many tokens in the next step.

    token budget   |= A: 1 =|= B: 1 =|= C: 512 (chunk of its prompt) =|= D: 300 =|      no phases:
                    RUNNING, best first ------------------------------ WAITING           every step is mixed

A request only has known tokens and computed tokens; scheduling it means computing some of the difference. A
decode has one token to compute, a prompt many, a preempted request its prompt and what it generated.

Running requests are served best first (first come, or priority and then first come). When blocks run out the
worst running request is preempted: it gives back its blocks (or moves to host memory), goes to the head of the
waiting line and is recomputed later, mostly from the prefix cache. The best one always gets its blocks, so the
engine always advances, and `add_request` refuses what could not run even alone.

A step asks arrays, not requests (running_batch.py): Python runs only for the rows that need blocks, have blocks to
store, or end, so its cost is linear in scheduled tokens and new blocks, whatever the contexts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pagebinder.errors import ConfigError, RequestError
from pagebinder.runtime.admission import Admission, check_fits, check_whole_ranges
from pagebinder.runtime.drafted_steps import DraftedSteps
from pagebinder.runtime.kv.blocks import require
from pagebinder.runtime.kv.coordinator import KVCacheManager
from pagebinder.runtime.request import Request, RequestStatus
from pagebinder.runtime.running_batch import RunningBatch
from pagebinder.runtime.scheduler_output import NO_DRAFTS, NOBODY, SchedulerOutput, SchedulerStats
from pagebinder.runtime.step_budget import Shares, cover, share_budget
from pagebinder.runtime.step_results import StepResults, resolve
from pagebinder.runtime.swap_policy import SwapPolicy
from pagebinder.runtime.waiting_queue import WaitingQueue

POLICIES = ("fcfs", "priority")


class Scheduler:
    """Continuous batching over one `KVCacheManager`. Not thread safe.

    Call `schedule()`, compute, then `update()` with the results. If computing failed, call `discard()`: the next
    `schedule()` asks for those tokens again.
    `policy`: "fcfs" or "priority" (lower `Request.priority` first). `long_prefill_token_threshold`: longest
    chunk of one request while others want tokens too (0: no limit; never less than an equal share).
    `mixed_prefill_tokens`: most prompt tokens of a step in which others decode (0: no limit but the budget).
    `watermark`: share of blocks kept free when a request is admitted beside running ones.
    `max_steps_in_flight`: how many steps may be scheduled before the first one's results are in. A request whose
    next token is not known yet sits such a step out, unless it has one of `ahead_flags` (`Request.flags`): then the
    step computes that token, and whoever runs it puts it in place (`SchedulerOutput.awaited`). With 1, scheduling
    again discards the step before.
    `swap_policy`: decides between swapping and recomputing; None never swaps.
    Raises ConfigError for sizes that contradict each other.
    """

    def __init__(
        self, kv: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
        policy: str = "fcfs", long_prefill_token_threshold: int = 0, mixed_prefill_tokens: int = 0,
        watermark: float = 0.0, max_steps_in_flight: int = 1, ahead_flags: int = 0,
        swap_policy: SwapPolicy | None = None,
    ) -> None:  # fmt: skip
        if policy not in POLICIES:
            raise ConfigError(f"scheduling policy {policy!r} is unknown; choose one of {', '.join(POLICIES)}")
        if max_num_seqs < 1 or max_num_batched_tokens < 1 or max_steps_in_flight < 1:
            raise ConfigError(
                "max_num_seqs, max_num_batched_tokens and max_steps_in_flight must be at least 1"
            )
        in_flight = max_num_batched_tokens * max_steps_in_flight
        if in_flight > kv.max_in_flight_tokens or max_model_len > kv.max_model_len:
            raise ConfigError(
                f"the KV cache was planned for steps of {kv.max_in_flight_tokens} tokens and contexts of "
                f"{kv.max_model_len}, but the scheduler is to use {in_flight} (max_num_batched_tokens x steps in "
                f"flight) and {max_model_len} (max_model_len); plan it for these"
            )
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.policy = policy
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.mixed_prefill_tokens = mixed_prefill_tokens
        self.max_steps_in_flight = max_steps_in_flight
        self.ahead_flags = ahead_flags if max_steps_in_flight > 1 else 0
        self.swap_policy = swap_policy
        self.stats = SchedulerStats()
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.batch = RunningBatch(kv.rows, self.requests)
        self._admission = Admission(kv, swap_policy, int(watermark * kv.pool.num_blocks))
        self._in_flight: list[int] = []
        # Requests that have finished a chunk since the last step: they hold what it needed to look back on.
        self._after_chunk: list[Request] = []
        # Held requests that lost their blocks: there is nothing to compute for them before their next token.
        self._parked: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._drafted = DraftedSteps(kv, self.batch, self.requests)

    # Requests

    def check_fits(self, prompt_len: int, max_tokens: int, num_encoder_tokens: int = 0) -> None:
        """Raise RequestError or CacheCapacityError unless a request of this size can run when it is alone."""
        check_fits(self.kv, self.max_model_len, prompt_len, max_tokens, num_encoder_tokens)

    def add_request(self, request: Request) -> None:
        """Put a new request in line. Raises RequestError for an id in use, and what `check_fits` raises."""
        self._check_id(request)
        self.check_fits(request.num_tokens, request.max_tokens, request.num_encoder_tokens)
        check_whole_ranges(request, self.max_num_batched_tokens)
        self.kv.extend_hashes(request)  # first, as what raises here must not leave a request that nobody runs
        self._enlist(request)
        self.waiting.push(self._key(request), request)

    def next_arrival(self) -> int:
        """A place in line for a request that is added later (`Request.arrival`)."""
        return next(self._arrivals)

    def fork(self, parent_id: str, child: Request, end: RequestStatus | None = None) -> None:
        """Add a request that starts as a copy of another: `child` (see `Request.child`) has the parent's computed
        tokens and at least one more. It shares the parent's blocks. If no seat is free, or the parent has no
        blocks, it waits like a preempted request. `end`: its last token ended it already.

        Raises RequestError for an unknown parent or an id in use, CacheCapacityError for a child that could not run
        to its end.
        """
        parent = self.requests.get(parent_id)
        if parent is None:
            raise RequestError(f"request {parent_id!r} is not in the engine: it cannot be forked")
        self._check_id(child)
        self.check_fits(child.num_prompt_tokens, child.max_tokens, child.num_encoder_tokens)
        self._enlist(child)
        self.stats.num_forks += 1
        if end is not None or self._is_full(child):
            self._finish(child, end or RequestStatus.FINISHED_LENGTH)
        elif not self._share_blocks(parent, child):
            child.status = RequestStatus.PREEMPTED
            self.kv.extend_hashes(child)
            self.waiting.push(self._key(child), child)

    def append_token(self, request_id: str, token: int) -> None:
        """Give a request that was held (see `update`) its next token."""
        request = self.requests[request_id]
        request.append_output(token)
        if request.status is RequestStatus.RUNNING:
            row = self.batch.row(request)
            self.batch.known[row] += 1
            self.batch.last_token[row] = token
        else:
            self.kv.extend_hashes(request)
            if self._parked.pop(request_id, None) is not None:
                self.waiting.push(self._key(request), request)

    def take_back(self, request_id: str, num_kept: int, tokens: Sequence[int]) -> None:
        """Replace all of a request's tokens but the first `num_kept`: what was computed of them is written anew.

        For requests that nobody reads, without a prefix cache, and with state that can be written anew (see
        `SingleTypeManager.takes_back`). At least one token is left to compute.
        """
        assert not self.kv.enable_caching and not self._in_flight, "cached blocks cannot be written anew"
        request = self.requests[request_id]
        request.all_token_ids[num_kept:] = tokens
        if request.status is RequestStatus.RUNNING:
            row, now = self.batch.row(request), self.batch.now()
            now.known[row] = request.num_tokens
            now.last_token[row] = request.all_token_ids[-1]
            now.computed[row] = now.planned[row] = min(
                int(now.computed[row]), num_kept, request.num_tokens - 1
            )
        elif self._parked.pop(request_id, None) is not None:
            self.waiting.push(self._key(request), request)

    def note_flags(self, request: Request) -> None:
        """Take over a request's changed `flags`."""
        if request.status is RequestStatus.RUNNING:
            self.batch.now().flags[self.batch.row(request)] = request.flags

    def abort(self, request_id: str) -> Request | None:
        """Finish a request with reason "abort" and free its blocks. None if it is unknown or finished.

        Allowed while steps are in flight: their blocks are not handed out before their results are in.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, RequestStatus.FINISHED_ABORTED)
        return request

    @property
    def running_rows(self) -> list[int]:
        """Rows of the running requests, best first."""
        return self.batch.order(self._key).tolist()

    @property
    def running(self) -> list[Request]:
        """Running requests, best first."""
        return [self.batch.by_row[row] for row in self.running_rows]

    @property
    def num_running(self) -> int:
        return len(self.batch)

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.batch)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # A step

    def schedule(self, drafts: Mapping[str, Sequence[int]] = NO_DRAFTS) -> SchedulerOutput:
        """Choose the next step's tokens and allocate their blocks. Empty if there is nothing to compute now.

        `drafts`: request id -> tokens that are guessed to come next. They are computed behind the request's newest
        token where the budget and free blocks allow; not with several steps in flight.
        """
        if len(self._in_flight) >= self.max_steps_in_flight:
            if self.max_steps_in_flight > 1:
                raise RuntimeError(
                    f"{len(self._in_flight)} steps are in flight: update or discard them first"
                )
            self.discard()
        if self._after_chunk:
            self._give_back_behind()
        preempted: list[str] = []
        counts, total, left, room = self._schedule_running(preempted)
        admitted: list[int] = []
        self._schedule_waiting(admitted, left, room)
        if total == 0 and not any(admitted) and self.requests and not self._in_flight:
            counts = self._make_room(admitted, preempted)
            total = int(counts.sum())
        if admitted:
            counts = np.concatenate((counts, np.array(admitted, np.int64)))
            total += sum(admitted)
        drafted = self._drafted.add(counts, self.max_num_batched_tokens - total, drafts) if drafts else {}
        total += sum(map(len, drafted.values()))
        return self._output(counts, total, len(admitted), tuple(preempted), drafted)

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, int] | Sequence[int],
        finished: Mapping[str, str] | None = None, forks: Sequence[tuple[str, Request]] = (),
        further: Mapping[str, Sequence[int]] = NO_DRAFTS,
    ) -> list[Request]:  # fmt: skip
        """Take the oldest step's results; returns the requests that are finished now.

        `sampled`: the new token of every row of `output.sampling`, -1 to hold a request until `append_token`; or
        request id -> token. `finished`: request id -> "stop", "length", "abort" or "error", as the engine
        decided; a request that has reached max_tokens or max_model_len is finished with "length" in any case.
        `forks`: (parent id, child) as for `fork`, done before anybody's blocks are freed. `further`: request id ->
        tokens behind the new one, as many as guesses stood (`SchedulerOutput.drafts`). Requests aborted meanwhile are
        skipped.
        Raises ValueError, with nothing changed, for a missing token, an unknown reason or an old `output`.
        """
        ends = {i: RequestStatus.from_finish_reason(reason) for i, reason in (finished or {}).items()}
        if output.step is not None and (not self._in_flight or output.step != self._in_flight[0]):
            raise ValueError("this step's results were given already, or another step was scheduled since")
        results = resolve(output, sampled, ends, self.batch)
        self._drafted.take_back_states(output, further)
        if output.step is not None:
            self.kv.step_finished(self._in_flight.pop(0))
        self._advance(results, output, further)
        if output.total_num_tokens > len(output.sampling):  # not everybody decodes
            chunks = np.arange(len(self.batch))[results.rows][results.counts > 1]
            self._after_chunk += [self.batch.by_row[row] for row in chunks.tolist()]
        for parent_id, child in forks:
            self.fork(parent_id, child, ends.pop(child.request_id, None))
        now = self.batch.now()
        for row in (now.known >= now.limit).nonzero()[0].tolist():
            ends.setdefault(now.by_row[row].request_id, RequestStatus.FINISHED_LENGTH)
        done = [self.requests[i] for i in ends if i in self.requests]
        for request in done:
            self._finish(request, ends[request.request_id])
        return done + [child for _, child in forks if child.is_finished]

    def discard(self) -> None:
        """Forget the steps in flight: their tokens are scheduled again.

        They may have run. Rows of K and V are written again with the same values, but a state that a step replaced
        is lost: such requests start over, from what the prefix cache has of them.
        """
        while self._in_flight:
            self.kv.step_finished(self._in_flight.pop(0))
        self._drafted.discard()
        batch = self.batch
        started = np.flatnonzero(batch.planned > batch.computed).tolist()
        spoilt = [
            batch.by_row[row] for row in started if self.kv.overwrites_state_at(int(batch.computed[row]))
        ]
        batch.planned[:] = batch.computed
        for request in spoilt:
            self._preempt(request, self.kv.free)

    def check_integrity(self) -> None:
        """Raise KVCacheIntegrityError if blocks are miscounted or a request is out of place. O(blocks)."""
        self.kv.check_integrity()
        batch, waiting = self.batch, {request.request_id for request in self.waiting.requests()}
        running = {request.request_id for request in batch.by_row}
        require(not waiting & running, f"both running and waiting: {sorted(waiting & running)}")
        parked = self._parked.keys()
        require(
            waiting | running | parked == self.requests.keys(), "a request is neither running nor waiting"
        )
        require(not parked & (waiting | running), f"held besides: {sorted(parked & (waiting | running))}")
        known = [request.num_tokens for request in batch.by_row]
        require(batch.known.tolist() == known, f"{known} tokens are known, the batch says {batch.known}")
        # Not `covered`: where tables have nulls ahead it is a careful guess, brought up to date when it is short.
        awaited = ((batch.now().flags & self.ahead_flags) != 0) * bool(self._in_flight)
        progress = np.stack((batch.computed, batch.planned, batch.known + awaited))
        require(bool((np.diff(progress, axis=0) >= 0).all()), "computed <= planned <= known does not hold")
        require(bool((batch.computed <= batch.known).all()), "more tokens are computed than known")

    # Inside: running requests

    def _schedule_running(self, preempted: list[str]) -> Shares:
        """The step's tokens. Nobody begins where somebody was preempted or waits for blocks that are in flight."""
        while True:
            batch = self.batch
            shares = share_budget(
                batch, self.max_num_batched_tokens, self._chunk_limit(), self._key, self.ahead_flags,
                self.mixed_prefill_tokens,
            )  # fmt: skip
            if preempted:
                shares = shares._replace(left=0, room=0)
            counts = shares.counts
            now = batch.now()
            short = ((now.planned + counts > now.covered) & (counts > 0)).nonzero()[0]
            if not len(short):
                return shares
            refused = cover(self.kv, batch, short, counts, self._key)
            if refused is None:
                return shares
            if self._in_flight:
                # Blocks that are freed now come back when those steps are done: preempting would gain nothing.
                order = batch.order(self._key)
                counts[order[order.tolist().index(refused) :]] = 0
                return Shares(counts, int(counts.sum()), 0, 0)
            victim = batch.by_row[batch.order(self._key)[-1]]
            self._preempt(victim)
            preempted.append(victim.request_id)

    def _give_back_behind(self) -> None:
        """A decoding request looks for blocks behind its windows when it needs a new one: that may be long."""
        batch = self.batch
        for request in self._after_chunk:
            if request.status is RequestStatus.RUNNING:
                self.kv.remove_skipped_blocks(request, int(batch.computed[batch.row(request)]))
        self._after_chunk.clear()

    def _chunk_limit(self) -> int:
        eligible = min(len(self.requests), self.max_num_seqs)
        if not self.long_prefill_token_threshold or eligible < 2:
            return self.max_num_batched_tokens
        return max(self.long_prefill_token_threshold, self.max_num_batched_tokens // eligible)

    # Inside: waiting requests

    def _schedule_waiting(self, admitted: list[int], budget: int, room: int) -> None:
        """Admit from the head of the line; appends the tokens of every new row to `admitted`. room: see `Shares`."""
        limit = self._chunk_limit()
        while budget > 0 and len(self.batch) < self.max_num_seqs:
            request = self.waiting.peek()
            if request is None:
                break
            entry = self._admission.try_admit(
                request, min(limit, budget), room=room, alone=not len(self.batch)
            )
            if entry is None:
                break
            self.waiting.pop()
            if request.status is RequestStatus.WAITING and not entry.swapped_in:
                request.num_cached_tokens = entry.num_computed_tokens
            self.stats.count_admission(request, entry.num_computed_tokens, swapped_in=entry.swapped_in)
            self._seat(request, entry.num_computed_tokens)
            admitted.append(entry.num_new_tokens)
            # An encoder runs as a whole, so the last one admitted may go beyond the budget, and no other.
            if self.kv.needs_encoder(request.request_id):
                budget -= request.num_encoder_tokens
            budget -= entry.num_new_tokens
            room -= entry.num_new_tokens

    def _make_room(self, admitted: list[int], preempted: list[str]) -> np.ndarray:
        """Nobody advances: running requests, those that are held first, give their blocks and seats to others.

        Returns the tokens of the rows that ran before.
        """
        for _ in range(len(self.batch)):
            batch = self.batch
            order = batch.order(self._key)
            is_held = batch.computed[order] == batch.known[order]
            if self.waiting.peek() is None and is_held.all():
                break
            victim = batch.by_row[(order[is_held] if is_held.any() else order)[-1]]
            # A request that was just admitted without tokens may go again; counts start anew.
            admitted.clear()
            self._preempt(victim)
            preempted.append(victim.request_id)
            counts = self._schedule_running(preempted).counts
            if counts.any():
                return counts
            before = len(self.batch)
            self._schedule_waiting(admitted, self.max_num_batched_tokens, self.max_num_batched_tokens)
            if any(admitted):
                return np.zeros(before, np.int64)
        raise RuntimeError(f"nobody can advance: {self.num_running} running, {self.num_waiting} waiting")

    # Inside: changes of one request

    def _seat(self, request: Request, num_computed_tokens: int) -> None:
        """A request that has just got blocks runs from now on."""
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        limit = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        covered = self.kv.covered_tokens(request.request_id)
        # An encoder's blocks are settled by the first results.
        first = num_computed_tokens + 1
        cache_at = first if request.num_encoder_tokens else self.kv.next_cache_at(request)
        self.batch.start(request, num_computed_tokens, covered, cache_at, limit)

    def _share_blocks(self, parent: Request, child: Request) -> bool:
        if parent.status is not RequestStatus.RUNNING or len(self.batch) >= self.max_num_seqs:
            return False
        batch, row = self.batch, self.batch.sync(parent)
        computed = parent.num_computed_tokens
        if not 0 < computed < child.num_tokens or batch.planned[row] != computed:
            return False
        if self.kv.needs_encoder(parent.request_id):  # its encoder's blocks hold nothing yet
            return False
        child.num_computed_tokens = computed
        self.kv.fork(parent, child)
        self.kv.extend_hashes(child)
        self._seat(child, computed)
        # Both may write only after the next allocation, which copies what they share.
        batch.covered[batch.row(parent)] = self.kv.covered_tokens(parent.request_id)
        return True

    def _preempt(self, request: Request, release: Callable[[Request], object] | None = None) -> None:
        row = self.batch.row(request)
        held = self.batch.computed[row] == self.batch.known[row]
        swapped = self.batch.stop(request, release or self._admission.give_up)
        self.stats.num_swaps_out += bool(swapped)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.kv.extend_hashes(request)
        if held:
            self._parked[request.request_id] = request
        else:
            self.waiting.push(self._key(request), request)

    def _advance(
        self, results: StepResults, output: SchedulerOutput, further: Mapping[str, Sequence[int]]
    ) -> None:
        """Computed tokens, new tokens, and the blocks that are full now."""
        now = self.batch.now()
        now.computed[results.rows] += results.counts
        if len(results.tokens):
            rows = results.sampling_rows
            now.known[rows] += 1
            now.last_token[rows] = results.tokens
            lists = now.token_lists
            if not isinstance(rows, slice):
                lists = [lists[row] for row in rows.tolist()]
            for tokens, token in zip(lists, results.tokens.tolist()):
                tokens.append(token)
        self._drafted.settle(output, further)
        due = (now.computed >= now.cache_at).nonzero()[0]
        if len(due):
            requests = [now.by_row[row] for row in due.tolist()]
            now.cache_at[due] = self.kv.cache_batch(requests, now.computed[due].tolist())

    def _finish(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            self.batch.stop(request, self.kv.free)
        self._admission.forget(request)
        self._parked.pop(request.request_id, None)
        request.status = status
        del self.requests[request.request_id]
        self.stats.num_finished += 1

    def _output(
        self, counts: np.ndarray, total: int, num_admitted: int, preempted: tuple[str, ...],
        drafts: dict[int, list[int]],
    ) -> SchedulerOutput:  # fmt: skip
        now, step = self.batch.now(), None
        planned = now.planned
        starts = planned.copy()
        planned += counts
        sampling = ((planned >= now.known) & (counts > 0)).nonzero()[0]
        awaited = NOBODY
        if self._in_flight and self.ahead_flags:
            awaited = ((planned > now.known) & (counts > 0)).nonzero()[0]
        if total:
            step = self.kv.step_started()
            self._in_flight.append(step)
            self.stats.num_scheduled_tokens += total
            self.stats.num_steps += 1
        return SchedulerOutput(
            now.by_row, starts, counts, sampling, now.last_token.copy(), now.flags.copy(),
            total_num_tokens=total, num_admitted=num_admitted, preempted_ids=preempted, step=step,
            moves=self.batch.moves, awaited=awaited, drafts=drafts, key=self._key,
        )  # fmt: skip

    def _check_id(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise RequestError(f"request id {request.request_id!r} is already in use; choose another")

    def _enlist(self, request: Request) -> None:
        if request.arrival < 0:
            request.arrival = next(self._arrivals)
        self.requests[request.request_id] = request

    def _key(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.policy == "priority" else 0, request.arrival)

    def _is_full(self, request: Request) -> bool:
        return request.num_output_tokens >= request.max_tokens or request.num_tokens >= self.max_model_len
