"""Guessed tokens in a step: who computes them, and what is taken back when they fail.

tokens   a b c | d e f       c is known, d e f are guessed: one step computes c d e f
stands   d e, then x         computed: a b c d e      known: a b c d e x
                             where a state was replaced: the state of b is back, computed: a b
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pagebinder.runtime.kv.coordinator import KeptStates, KVCacheManager
from pagebinder.runtime.request import Request, RequestStatus
from pagebinder.runtime.running_batch import RunningBatch
from pagebinder.runtime.scheduler_output import SchedulerOutput


class DraftedSteps:
    """The scheduler's, for one step at a time: `add`, then `take_back_states` and `settle`, or `discard`."""

    def __init__(self, kv: KVCacheManager, batch: RunningBatch, requests: Mapping[str, Request]) -> None:
        self.kv, self.batch, self.requests = kv, batch, requests
        # What the step in flight replaces, of requests with guesses whose state cannot be written anew.
        self._kept: dict[str, KeptStates] = {}

    def add(self, counts: np.ndarray, room: int, drafts: Mapping[str, Sequence[int]]) -> dict[int, list[int]]:
        """Guessed tokens by row, added to `counts` [R] of requests that reach their newest token in this step: at
        most `room`, and as far as there are blocks. Nobody is preempted for them."""
        drafted: dict[int, list[int]] = {}
        for request_id, tokens in drafts.items():
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            row = self.batch.row(request)
            count = self._room_of(request, row, int(counts[row]), min(len(tokens), room))
            if count > 0 and self._keep_states(request_id, row):
                drafted[row] = list(tokens[:count])
                counts[row] += count
                room -= count
        return drafted

    def take_back_states(self, output: SchedulerOutput, further: Mapping[str, Sequence[int]]) -> None:
        """States that swallowed guesses which failed are those of before the step again. Before it has finished."""
        for row, drafts in output.drafts.items():
            request = output.requests[row]
            kept = self._kept.pop(request.request_id, None)
            failed = len(drafts) > len(further.get(request.request_id, ()))
            if kept is not None and failed and request.status is RequestStatus.RUNNING:
                self.kv.take_back(request.request_id, kept)

    def settle(self, output: SchedulerOutput, further: Mapping[str, Sequence[int]]) -> None:
        """Give requests the tokens behind their first new one. As many guesses stand: what the others wrote is
        written anew, and where states were taken back all of the step is."""
        for row, drafts in output.drafts.items():
            request = output.requests[row]
            if request.status is RequestStatus.RUNNING:
                tokens = further.get(request.request_id, ())
                self._settle(request, int(output.starts[row]), len(drafts) - len(tokens), tokens)

    def discard(self) -> None:
        """The step is forgotten."""
        self._kept.clear()

    def _room_of(self, request: Request, row: int, count: int, wanted: int) -> int:
        """How many guesses a request can take behind the `count` tokens that it computes."""
        now = self.batch.now()
        start, end = int(now.planned[row]), int(now.planned[row]) + count
        if not count or end != now.known[row]:
            return 0
        # The step itself gives one more token.
        wanted = min(wanted, int(now.limit[row]) - end - 1)
        if wanted > 0 and end + wanted > now.covered[row]:
            covered = self.kv.allocate_batch([request], [start], [end + wanted], [start])
            if not covered:
                return min(wanted, int(now.covered[row]) - end)
            now.covered[row] = covered[0]
        return wanted

    def _keep_states(self, request_id: str, row: int) -> bool:
        """False: there is no room to keep what would be replaced."""
        if self.kv.takes_back:
            return True
        kept = self.kv.keep_states(request_id, int(self.batch.planned[row]))
        if kept is not None:
            self._kept[request_id] = kept
        return kept is not None

    def _settle(self, request: Request, start: int, num_failed: int, further: Sequence[int]) -> None:
        now, row = self.batch.now(), self.batch.row(request)
        if num_failed and not self.kv.takes_back:
            now.computed[row] = now.planned[row] = start
        else:
            now.computed[row] -= num_failed
            now.planned[row] -= num_failed
        if further:
            request.all_token_ids.extend(further)
            now.known[row] += len(further)
            now.last_token[row] = further[-1]
