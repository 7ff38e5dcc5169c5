"""One request on its way through the engine.

    all_token_ids   | prompt ............. | output ... |
                    |<-- num_computed_tokens -->|<----->|  still to compute

What is still to compute may be prefill, decode, or recomputation after preemption: the scheduler sees no
difference. While a request runs, the scheduler keeps its progress in arrays (`RunningBatch`) and writes
`num_computed_tokens` here whenever somebody is to read it; the list of tokens is always up to date.
"""

from __future__ import annotations

import enum
from typing import Any

from pagebinder.errors import RequestError


class RequestStatus(enum.Enum):
    """Where a request is. The value of a finished status is its finish reason."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED

    @classmethod
    def from_finish_reason(cls, reason: str) -> RequestStatus:
        """The finished status of "stop", "length", "abort" or "error"; ValueError for anything else."""
        status = cls(reason)
        if not status.is_finished:
            raise ValueError(f"{reason!r} is not a finish reason")
        return status


_FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED"))


class Request:
    """Tokens, progress and place in line of one request.

    `priority`: lower is served first (policy "priority" only). `arrival`: order of arrival, set by the scheduler
    unless it was given before. `params` and `flags` are the engine's own (sampling parameters; bits that the
    running batch keeps per row); nothing here looks into them.
    `cache_salt`, `adapter`: requests that differ in them share no cached prefix. `media`: (identifier, start, end)
    of token ranges that stand for images or the like. `encoder_hash`, `num_encoder_tokens`, `encoder_token_ids`: what
    the encoder of an encoder-decoder model reads (None, 0, empty: nothing). `swap_image`: where its state lies in
    host memory, if anywhere. `held`: what it keeps from others until it is finished, and its forks are (rows of
    embeddings). `position_shifts`: (token, shift), sorted: from that token on positions are so much larger than
    places, up to the next. `whole_ranges`: (start, end), sorted and disjoint, of prompt tokens that see each other,
    so that one step computes all of them.
    Raises RequestError for an empty prompt or max_tokens < 1.
    """

    __slots__ = (
        "_status",
        "adapter",
        "all_token_ids",
        "arrival",
        "block_hashes",
        "cache_salt",
        "encoder_hash",
        "encoder_token_ids",
        "flags",
        "held",
        "max_tokens",
        "media",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_encoder_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "position_shifts",
        "priority",
        "prompt_token_ids",
        "request_id",
        "swap_image",
        "whole_ranges",
    )

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], *, max_tokens: int, priority: int = 0,
        cache_salt: str | None = None, params: Any = None, adapter: str | None = None,
        media: tuple[tuple[str, int, int], ...] = (), encoder_hash: bytes | None = None,
        num_encoder_tokens: int = 0, encoder_token_ids: tuple[int, ...] = (), held: tuple = (),
        position_shifts: tuple[tuple[int, int], ...] = (), whole_ranges: tuple[tuple[int, int], ...] = (),
    ) -> None:  # fmt: skip
        if not prompt_token_ids:
            raise RequestError(f"request {request_id!r} has an empty prompt; give at least one token")
        if max_tokens < 1:
            raise RequestError(f"request {request_id!r}: max_tokens is {max_tokens}; it must be at least 1")
        ends = (0, *(end for _, _, end in media))
        if any(not before <= start < end for before, (_, start, end) in zip(ends, media)):
            raise RequestError(
                f"request {request_id!r}: media ranges must be (identifier, start, end) with start < end, sorted "
                f"and disjoint; got {media}"
            )
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        # Grows in place and never shrinks, so whoever remembers a length can read that state later.
        self.all_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_computed_tokens = 0
        # Prompt tokens that the prefix cache saved when the request was first admitted.
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.block_hashes: list[bytes] = []
        self.priority = priority
        self.arrival = -1
        self.max_tokens = max_tokens
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.media = tuple(media)
        self.held = held
        self.position_shifts = position_shifts
        self.whole_ranges = whole_ranges
        self.encoder_hash = encoder_hash
        self.num_encoder_tokens = num_encoder_tokens
        self.encoder_token_ids = encoder_token_ids
        self.params = params
        self.flags = 0
        self.swap_image: Any = None

    @property
    def status(self) -> RequestStatus:
        return self._status

    @status.setter
    def status(self, status: RequestStatus) -> None:
        self._status = status
        if status.is_finished:
            self.held = ()

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, in a new list."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def finish_reason(self) -> str | None:
        return self.status.value if self.status.is_finished else None

    @property
    def whole_until(self) -> int:
        """Behind the last of its ranges that are computed as a whole; 0: there are none."""
        return self.whole_ranges[-1][1] if self.whole_ranges else 0

    def fit_chunk(self, start: int, count: int, room: int) -> int:
        """How many tokens from `start` on a step computes that would compute `count` of them: fewer where that would
        cut a range that is computed as a whole, all of the range where it begins there and `room` allows, else 0."""
        end = start + count
        for first, behind in self.whole_ranges:
            if first < end < behind:
                if first > start:
                    return first - start
                return behind - start if behind - start <= room else 0
        return count

    def append_output(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)

    def child(self, request_id: str, num_tokens: int, *, max_tokens: int, params: Any = None) -> Request:
        """A new request that starts with the first `num_tokens` (prompt at least) tokens of this one."""
        assert num_tokens >= self.num_prompt_tokens, "a child shares the whole prompt"
        child = Request(
            request_id, self.prompt_token_ids, max_tokens=max_tokens, priority=self.priority,
            cache_salt=self.cache_salt, params=params, adapter=self.adapter, media=self.media,
            encoder_hash=self.encoder_hash, num_encoder_tokens=self.num_encoder_tokens,
            encoder_token_ids=self.encoder_token_ids, held=self.held, position_shifts=self.position_shifts,
            whole_ranges=self.whole_ranges,
        )  # fmt: skip
        child.all_token_ids += self.all_token_ids[self.num_prompt_tokens : num_tokens]
        child.num_cached_tokens = self.num_cached_tokens
        return child

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens} of "
            f"{self.num_tokens} tokens computed)"
        )
