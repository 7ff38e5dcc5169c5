"""One request on its way through the engine.

    all_token_ids   | prompt ............. | output ... |
                    |<-- num_computed_tokens -->|<----->|  still to compute

What is still to compute may be prefill, decode, or recomputation after preemption: the scheduler sees no
difference.
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
        return self.name.startswith("FINISHED")

    @classmethod
    def from_finish_reason(cls, reason: str) -> RequestStatus:
        """The finished status of "stop", "length", "abort" or "error"; ValueError for anything else."""
        status = cls(reason)
        if not status.is_finished:
            raise ValueError(f"{reason!r} is not a finish reason")
        return status


class Request:
    """Tokens, progress and place in line of one request.

    `priority`: lower is served first (policy "priority" only). `arrival` is set by the scheduler: its order
    of arrival. `params` is the engine's own (sampling parameters); nothing here looks into it.
    `cache_salt`: requests with different salts share no cached prefix.
    Raises RequestError for an empty prompt or max_tokens < 1.
    """

    __slots__ = (
        "all_token_ids",
        "arrival",
        "block_hashes",
        "cache_salt",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "output_token_ids",
        "params",
        "priority",
        "prompt_token_ids",
        "request_id",
        "status",
    )

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], *, max_tokens: int, priority: int = 0,
        cache_salt: str | None = None, params: Any = None,
    ) -> None:  # fmt: skip
        if not prompt_token_ids:
            raise RequestError(f"request {request_id!r} has an empty prompt; give at least one token")
        if max_tokens < 1:
            raise RequestError(f"request {request_id!r}: max_tokens is {max_tokens}; it must be at least 1")
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        # Kept beside its two parts so that a step can slice tokens without joining lists.
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
        self.params = params

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def finish_reason(self) -> str | None:
        return self.status.value if self.status.is_finished else None

    def append_output(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens} of "
            f"{self.num_tokens} tokens computed)"
        )
