"""What the engine gives back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request's continuation so far.

    Attributes:
        token_ids: all generated tokens (the prompt is not part of it).
        text: the generated text, if the model has a tokenizer, else None. While a stop string could still be
            completing, its possible beginning is held back.
        finish_reason: "stop" (end-of-sequence, stop token or stop string), "length", "abort"; None while running.
        logprobs: one dict token id -> log-probability per generated token, if asked for.
        num_cached_tokens: prompt tokens that the prefix cache served.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None = None
    finished: bool = False
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine started, and its present state."""

    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    kv_usage: float
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    scheduled_tokens: int
    generated_tokens: int
    busy_seconds: float
    tokens_per_second: float
    finished_requests: int
    step_seconds: dict[str, float] = field(default_factory=dict)
