"""What the engine gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from pagebinder.runtime.output_text import OutputText
from pagebinder.runtime.request import Request


@dataclass(init=False, repr=False, eq=False)
class RequestOutput:
    """A request's continuation so far. It does not change while the request goes on.

    A request's tokens only grow, so an output remembers how many there were; lists and text are made when they are
    asked for. A step therefore costs the same for a long continuation as for a short one.

    Attributes:
        request_id, prompt_token_ids (shared with the request: do not change it).
        token_ids: all generated tokens (the prompt is not part of it).
        text: the generated text, if the model has a tokenizer, else None. While a stop string could still be
            completing, its possible beginning is held back.
        finished: nothing more will come. finish_reason: "stop" (end-of-sequence, stop token or stop string),
            "length", "abort", "error" (its guide gave up: the log says why); None while running.
        logprobs: one dict token id -> log-probability per generated token, if asked for.
        num_cached_tokens: prompt tokens that the prefix cache served.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finished: bool
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None
    num_cached_tokens: int

    __slots__ = (
        "_logprobs",
        "_num_tokens",
        "_request",
        "_text",
        "_token_ids",
        "finish_reason",
        "finished",
        "num_cached_tokens",
        "request_id",
    )

    def __init__(
        self, request: Request, text: OutputText | None = None, logprobs: list[dict[int, float]] | None = None,
        finish_reason: str | None = None,
    ) -> None:  # fmt: skip
        self.request_id = request.request_id
        self.finish_reason = finish_reason or request.finish_reason
        self.finished = self.finish_reason is not None
        self.num_cached_tokens = request.num_cached_tokens
        self._request = request
        self._num_tokens = len(request.all_token_ids)
        self._text = text
        self._logprobs = logprobs
        self._token_ids: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens; cheaper than `len(token_ids)`."""
        return self._num_tokens - self._request.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._request.prompt_token_ids

    @property
    def token_ids(self) -> list[int]:
        if self._token_ids is None:
            self._token_ids = self._request.all_token_ids[self._request.num_prompt_tokens : self._num_tokens]
        return self._token_ids

    @property
    def text(self) -> str | None:
        return None if self._text is None else self._text.after(self.num_tokens, self.finished)

    @property
    def text_offsets(self) -> list[int] | None:
        """How many characters of `text` were shown before each generated token came; None without a tokenizer."""
        return None if self._text is None else self._text.offsets(self.num_tokens)

    @property
    def num_encoder_tokens(self) -> int:
        """Of an encoder-decoder's encoder prompt."""
        return self._request.num_encoder_tokens

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        return None if self._logprobs is None else self._logprobs[: self.num_tokens]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestOutput) and asdict(self) == asdict(other)

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, token_ids={self.token_ids}, text={self.text!r}, "
            f"finished={self.finished}, finish_reason={self.finish_reason!r})"
        )


@dataclass(frozen=True, kw_only=True)
class Beam:
    """One continuation that beam search found.

    Attributes:
        token_ids: generated tokens; the end-of-sequence token is one of them.
        logprob: sum of the tokens' log-probabilities. score: logprob / number of tokens ** length_penalty.
        finished: it ended with an end-of-sequence token, not at the limit.
    """

    token_ids: list[int]
    logprob: float
    score: float
    finished: bool


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counters since the engine started, and its present state.

    Attributes:
        prefix_hit_rate: share of prompt tokens of newly admitted requests that the prefix cache served;
            resumed_hit_rate: the same for requests that came back after a preemption.
        forks, copies, swaps_out, swaps_in: requests that started as a copy of another; blocks copied because one
            of several owners was to write; requests moved to host memory and back.
        encoder_runs, encoder_tokens: how often the encoder of an encoder-decoder ran, over how many tokens.
        deferred_blocks: blocks given back that a step in flight still reads.
        cached_prefixes: prefix ends that a hit can find. blocks_in_use: blocks in the tables of running requests,
            per KV group (a shared block counts for each of them).
        host_blocks, free_host_blocks: swap space.
        copy_bytes_per_second, prefill_tokens_per_second: measured rates behind "swap or recompute"; None before
            the first measurement.
        cascaded_steps: steps that read a prefix of several requests once for all of them; cascade_saved_tokens: keys
            that they did not read again. cascade_refusals: steps in which requests read a prefix each for itself, by
            reason: "cost", or "window" (several have outgrown one).
        ahead_steps: steps launched before the results of the one before; waited_steps: those that had to wait for
            them though steps are asynchronous, by reason; overshot_tokens: computed for requests that had ended.
        drafted_tokens: tokens that were guessed (`EngineConfig.drafter`) and checked; accepted_tokens: those of them
            that were right.
        step_seconds: time by part of a step; busy_seconds is their sum.
        captured: what steps are captured, "off", or why none is. graph_replays: replays by size ("decode 8").
            uncaptured_steps: steps that ran op by op though sizes are captured, by reason. padding_tokens: tokens
            that replays computed for nobody.
    """

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
    prefix_hit_rate: float = 0.0
    resumed_hit_rate: float = 0.0
    forks: int = 0
    copies: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    encoder_runs: int = 0
    encoder_tokens: int = 0
    deferred_blocks: int = 0
    cached_prefixes: int = 0
    blocks_in_use: tuple[int, ...] = ()
    host_blocks: int = 0
    free_host_blocks: int = 0
    copy_bytes_per_second: float | None = None
    prefill_tokens_per_second: float | None = None
    step_seconds: dict[str, float] = field(default_factory=dict)
    cascaded_steps: int = 0
    cascade_saved_tokens: int = 0
    cascade_refusals: dict[str, int] = field(default_factory=dict)
    ahead_steps: int = 0
    waited_steps: dict[str, int] = field(default_factory=dict)
    overshot_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    captured: str = "off"
    graph_replays: dict[str, int] = field(default_factory=dict)
    uncaptured_steps: dict[str, int] = field(default_factory=dict)
    padding_tokens: int = 0
