"""What the scheduler decides in one step, and what it counts.

    tokens of a request   |###### computed ######|== this step's chunk ==|.. later ..|
                                                 ^ start                 ^ start + count

A step is a batch of rows: row r computes `counts[r]` tokens from `starts[r]` on, maybe none. A row *samples* when
nothing is left for later: its chunk reaches the last known token, whose logits give a new one. Behind that token a
row may compute guessed ones (`drafts`), each with a row of logits of its own:

    rows of logits    | request 0 | request 2: newest token, guess, guess | request 3 |      first_logits = 0, 1, 4
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pagebinder.runtime.request import Request, RequestStatus

NOBODY = np.empty(0, np.int64)
NO_DRAFTS: Mapping = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Tokens [start, start + num_new_tokens) of a request are to be computed.

    `samples`: the last of them is the last known token, so its logits give a new one.
    """

    request: Request
    start: int
    num_new_tokens: int
    samples: bool


class SchedulerOutput:
    """One step. Blocks for all of it are allocated.

    Attributes:
        requests: R requests, row by row. starts, counts: [R] int64 tokens.
        sampling: [S] int64 rows that sample, in ascending order: the order of the rows of the logits.
        last_token: [R] int64, each request's newest token; flags: [R] int64, `Request.flags`.
        awaited: [A] int64 rows that compute the token which the step before is choosing for them, in ascending order;
            `last_token` has an older one.
        drafts: row -> guessed tokens that it computes behind its newest one; part of its count.
        num_admitted: the last so many rows were admitted in this step. preempted_ids: who lost its blocks.
        step: number of the step in flight; None if there is nothing to compute.
        moves: `RunningBatch.moves` when the step was made.
    """

    __slots__ = (
        "_key",
        "awaited",
        "counts",
        "drafts",
        "flags",
        "last_token",
        "moves",
        "num_admitted",
        "preempted_ids",
        "requests",
        "sampling",
        "starts",
        "step",
        "total_num_tokens",
    )

    def __init__(
        self, requests: Sequence[Request], starts: np.ndarray, counts: np.ndarray, sampling: np.ndarray,
        last_token: np.ndarray, flags: np.ndarray, *, total_num_tokens: int, num_admitted: int = 0,
        preempted_ids: tuple[str, ...] = (), step: int | None = None, moves: int = 0, awaited: np.ndarray = NOBODY,
        drafts: Mapping[int, list[int]] = NO_DRAFTS,
        key: Callable[[Request], tuple] | None = None,
    ) -> None:  # fmt: skip
        self.requests, self.starts, self.counts, self.sampling = requests, starts, counts, sampling
        self.last_token, self.flags, self.awaited = last_token, flags, awaited
        self.total_num_tokens, self.num_admitted = total_num_tokens, num_admitted
        self.preempted_ids, self.step, self.moves = preempted_ids, step, moves
        self.drafts = drafts
        self._key = key

    @property
    def num_logits(self) -> int:
        """L, rows of logits."""
        return len(self.sampling) + sum(map(len, self.drafts.values()))

    @property
    def draft_counts(self) -> np.ndarray:
        """Guessed tokens of every row [R] int64."""
        counts = np.zeros(len(self.counts), np.int64)
        for row, tokens in self.drafts.items():
            counts[row] = len(tokens)
        return counts

    @property
    def first_logits(self) -> np.ndarray:
        """Of every row that samples [S] int64, which row of the logits its newest token has."""
        counts = 1 + self.draft_counts[self.sampling]
        return np.cumsum(counts) - counts

    @property
    def scheduled(self) -> tuple[ScheduledRequest, ...]:
        """The requests that compute something: running ones best first, then the newly admitted. O(R log R):
        for inspection; the engine reads the arrays."""
        samples, first_new = set(self.sampling.tolist()), len(self.requests) - self.num_admitted
        rows = list(range(first_new))
        if self._key is not None:
            rows.sort(key=lambda row: self._key(self.requests[row]))
        return tuple(
            ScheduledRequest(self.requests[r], int(self.starts[r]), int(self.counts[r]), r in samples)
            for r in (*rows, *range(first_new, len(self.requests)))
            if self.counts[r]
        )

    @property
    def sampling_ids(self) -> list[str]:
        """The request ids that sample, in the order of the rows of the logits."""
        return [self.requests[row].request_id for row in self.sampling.tolist()]


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start. Prefix counters are of first admissions; resumed requests count apart."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    resumed_queried_tokens: int = 0
    resumed_hit_tokens: int = 0
    num_forks: int = 0
    num_swaps_out: int = 0
    num_swaps_in: int = 0

    def count_admission(self, request: Request, num_hit_tokens: int, *, swapped_in: bool) -> None:
        """Of a request that runs from now on, still with the status that it had in line."""
        if swapped_in:
            self.num_swaps_in += 1
        elif request.status is RequestStatus.WAITING:
            self.prefix_queried_tokens += request.num_tokens
            self.prefix_hit_tokens += num_hit_tokens
        else:
            self.resumed_queried_tokens += request.num_tokens
            self.resumed_hit_tokens += num_hit_tokens
