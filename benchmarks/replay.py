"""Replays a trace on the real scheduler and KV-cache manager, with the event recorder looking on; no model.

trace --arrivals--> Scheduler.schedule() --> recorder --> Scheduler.update(scripted tokens) --> next turns arrive
"""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass

from traces import TraceRequest

from pagebinder.runtime.kv import KVCacheManager
from pagebinder.runtime.kv.event_log import KVEventLog
from pagebinder.runtime.kv.event_recorder import KVEventRecorder
from pagebinder.runtime.kv.retention import PrefixRetention
from pagebinder.runtime.request import Request
from pagebinder.runtime.scheduler import Scheduler

STEP_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class CacheSetup:
    """One way to run a trace. `retention` None: no prefix caching."""

    plan: object
    num_blocks: int
    max_model_len: int
    retention: PrefixRetention | None
    max_num_seqs: int = 64

    def scheduler(self) -> Scheduler:
        kv = KVCacheManager(
            self.plan.groups, self.num_blocks, max_model_len=self.max_model_len,
            max_in_flight_tokens=STEP_TOKENS, enable_caching=self.retention is not None,
            retention=self.retention or PrefixRetention.dense(),
        )  # fmt: skip
        return Scheduler(
            kv, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=STEP_TOKENS,
            max_model_len=self.max_model_len,
        )  # fmt: skip


class Replay:
    """Feeds requests to a scheduler as they arrive and answers with their scripted tokens.

    A request with several samples is forked when its prompt has been computed, as the engine does.
    """

    def __init__(self, setup: CacheSetup) -> None:
        self.scheduler = setup.scheduler()
        self.recorder = KVEventRecorder(self.scheduler, bytes_per_block=setup.plan.bytes_per_block)
        self.busy_seconds = 0.0
        self.num_steps = 0
        self._scripts: dict[str, tuple[int, ...]] = {}
        self._sources: dict[str, TraceRequest] = {}
        self._left: dict[str, int] = {}  # name in the trace -> samples that still run
        self._followers: dict[str, list[TraceRequest]] = {}
        self._arrivals: list[tuple[int, int, TraceRequest]] = []
        self._numbers = itertools.count()

    @property
    def log(self) -> KVEventLog:
        return self.recorder.log

    def run(self, trace: list[TraceRequest]) -> KVEventLog:
        """Replay a trace from now on until the last request has ended."""
        for item in trace:
            if item.after is None:
                self._plan_arrival(item)
            else:
                self._followers.setdefault(item.after, []).append(item)
        while self._arrivals or self.scheduler.has_unfinished:
            if not self.scheduler.has_unfinished:  # nobody is there: skip to the next arrival
                self.num_steps = max(self.num_steps, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= self.num_steps:
                self._add(heapq.heappop(self._arrivals)[2])
            self.step()
        return self.log

    def step(self) -> None:
        """One step; the recorder's own time is not counted."""
        started = time.perf_counter()
        output = self.scheduler.schedule()
        self.busy_seconds += time.perf_counter() - started
        self.recorder.record_step(output)
        tokens, forks = [], []
        for row in output.sampling.tolist():
            request = output.requests[row]
            tokens.append(self._scripts[request.request_id][request.num_output_tokens])
            if request.num_output_tokens == 0:
                forks += self._samples(request)
        started = time.perf_counter()
        finished = self.scheduler.update(output, tokens, forks=forks) if output.step is not None else []
        self.busy_seconds += time.perf_counter() - started
        self.num_steps += 1
        for request in finished:
            self._end(request.request_id)

    def _plan_arrival(self, item: TraceRequest) -> None:
        heapq.heappush(self._arrivals, (self.num_steps + item.delay_steps, next(self._numbers), item))

    def _add(self, item: TraceRequest) -> None:
        self._scripts[item.name], self._sources[item.name] = item.answers[0], item
        self._left[item.name] = len(item.answers)
        self.scheduler.add_request(Request(item.name, list(item.prompt), max_tokens=len(item.answers[0])))

    def _samples(self, parent: Request) -> list[tuple[str, Request]]:
        """The other samples of a request whose prompt has just been computed."""
        item = self._sources.get(parent.request_id)
        forks = []
        for i, answer in enumerate(item.answers[1:] if item else (), 1):
            child = parent.child(f"{item.name}/{i}", parent.num_prompt_tokens, max_tokens=len(answer))
            child.append_output(answer[0])
            self._scripts[child.request_id] = answer
            forks.append((parent.request_id, child))
        return forks

    def _end(self, request_id: str) -> None:
        name = request_id.split("/")[0]
        self._left[name] -= 1
        if not self._left[name]:
            for item in self._followers.pop(name, ()):
                self._plan_arrival(item)
