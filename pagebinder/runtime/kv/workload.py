"""What a cache is planned for: how long requests are, how many run, what their prompts share.

    context of T tokens   [ prefix: prefix_share * T ][ own tokens ................. ]
                            held once by all            held by every request

Lengths should be given as they occur. Round numbers are multiples of every block size, so a plan for them shows no
rounding at a request's end; `grown` spreads lengths over the last part of a request's life instead.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagebinder.errors import ConfigError

Histogram = tuple[tuple[int, float], ...]

# The default: lengths that are spread evenly in the logarithm, from a short chat to a long document.
SHORTEST_TOKENS, LONGEST_TOKENS, NUM_LENGTHS = 128, 32_768, 48
# Models made for a million tokens are given longer documents: up to this share of their length.
LONG_CONTEXT_SHARE, LONGEST_LONG_TOKENS = 1 / 16, 131_072
LONGEST_ENCODER_TOKENS = 2_048
GROWTH_SAMPLES = 16
# A model length without limits, for questions about a workload or a layer alone.
UNLIMITED_TOKENS = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests that a plan is optimised for.

    Args:
        contexts: (tokens, weight) pairs, the histogram of context lengths. Weights need not add up to 1.
        encoders: the same for the encoder's tokens; models with cross attention need it, others
            refuse it (but for the default's).
        concurrency: requests that hold memory at once.
        prefix_share: share of a context that is a prefix common to all requests, 0.0 to 1.0.
        tokens_in_flight: mean number of tokens that a request computes in one step. Most requests decode one;
            the share tokens_in_flight / chunk_tokens is taken to compute a chunk of its prompt.
        chunk_tokens: tokens of such a chunk (an engine's max_num_batched_tokens).
        sparse_retention: recurrent layers keep checkpoints only where a cached prefix ends, not at each boundary.
    Raises:
        ConfigError: values out of range.
    """

    contexts: Histogram
    encoders: Histogram = ()
    concurrency: int = 32
    prefix_share: float = 0.25
    tokens_in_flight: float = 64.0
    chunk_tokens: int = 2048
    sparse_retention: bool = True

    def __post_init__(self) -> None:
        for name, needed in (("contexts", True), ("encoders", False)):
            object.__setattr__(self, name, _normalised(getattr(self, name), name, needed))
        for name in ("concurrency", "chunk_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"workload: {name}={value!r}: use a whole number, at least 1.")
        for name, high in (("prefix_share", 1.0), ("tokens_in_flight", float(self.chunk_tokens))):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= high:
                raise ConfigError(f"workload: {name}={value!r}: use a number from 0 to {high:g}.")
        if not isinstance(self.sparse_retention, bool):
            raise ConfigError(f"workload: sparse_retention={self.sparse_retention!r}: use true or false.")

    @property
    def prefill_share(self) -> float:
        """Share of the requests that compute a chunk of their prompt rather than decode."""
        return self.tokens_in_flight / self.chunk_tokens

    @property
    def sharers(self) -> float:
        """Share of a common prefix that each request does not hold itself: 1 - 1 / concurrency."""
        return 1 - 1 / self.concurrency

    @property
    def mean_tokens(self) -> float:
        return sum(tokens * weight for tokens, weight in self.contexts)

    def prefix_tokens(self, tokens: int) -> int:
        """Tokens of a context of `tokens` that are common with the other requests."""
        return int(self.prefix_share * tokens)

    @classmethod
    def default(cls, max_model_len: int, max_encoder_tokens: int | None = None) -> Workload:
        """Contexts of 128 to 32,768 tokens (or the model's length, if that is less; a sixteenth of it, if that is
        more), each octave equally likely; the same for the encoder's tokens, from 128 to 2,048 (or its limit)."""
        long = min(int(max_model_len * LONG_CONTEXT_SHARE), LONGEST_LONG_TOKENS)
        high = min(max_model_len, max(LONGEST_TOKENS, long))
        longest_encoder = min(max_encoder_tokens or LONGEST_ENCODER_TOKENS, LONGEST_ENCODER_TOKENS)
        return cls(
            contexts=_log_spread(_shortest(high), high),
            encoders=_log_spread(_shortest(longest_encoder), longest_encoder),
        )

    @classmethod
    def grown(cls, lengths: Sequence[tuple[int, float]], **options) -> Workload:
        """Requests that grow to these (tokens, weight): seen at points of the last quarter of their life."""
        spread = [
            (max(1, round(tokens * (0.75 + 0.25 * (i + 0.5) / GROWTH_SAMPLES))), weight)
            for tokens, weight in _normalised(lengths, "contexts", True)
            for i in range(GROWTH_SAMPLES)
        ]
        return cls(contexts=tuple(spread), **options)

    @classmethod
    def of(
        cls,
        value: Workload | Mapping[str, Any] | None,
        max_model_len: int,
        max_encoder_tokens: int | None = None,
    ) -> Workload:
        """A workload from what users give: None is the default, a mapping has the fields by name.

        Raises ConfigError for unknown fields, and for contexts or encoder prompts that the model cannot have.
        """
        if value is None:
            return cls.default(max_model_len, max_encoder_tokens)
        if isinstance(value, Mapping):
            value = cls._from_mapping(value, max_model_len, max_encoder_tokens)
        if not isinstance(value, Workload):
            raise ConfigError(f"workload={value!r}: use a Workload, a mapping of its fields, or None.")
        longest = max(tokens for tokens, _ in value.contexts)
        if longest > max_model_len:
            raise ConfigError(
                f"workload: a context of {longest:,} tokens is longer than max_model_len ({max_model_len:,}); "
                "shorten it, or raise max_model_len."
            )
        longest = max((tokens for tokens, _ in value.encoders), default=0)
        if max_encoder_tokens is not None and longest > max_encoder_tokens:
            raise ConfigError(
                f"workload: an encoder prompt of {longest:,} tokens is longer than the {max_encoder_tokens:,} that "
                "the model's encoder takes; shorten it."
            )
        return value

    @classmethod
    def _from_mapping(
        cls, value: Mapping[str, Any], max_model_len: int, max_encoder_tokens: int | None
    ) -> Workload:
        names = [f.name for f in dataclasses.fields(cls)]
        for key in value:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ConfigError(f"workload has no field {key!r}{hint} Fields: {', '.join(names)}.")
        default = cls.default(max_model_len, max_encoder_tokens)
        return cls(**{"contexts": default.contexts, "encoders": default.encoders, **value})


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _normalised(pairs, name: str, needed: bool) -> Histogram:
    """Checked (tokens, weight) pairs whose weights add up to 1."""
    example = f"workload: {name} is a list of (tokens, weight), for example [[2000, 0.7], [8000, 0.3]]"
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs
    ):
        raise ConfigError(f"{example}, not {pairs!r}.")
    for tokens, weight in pairs:
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ConfigError(f"{example}; {tokens!r} is not a number of tokens, at least 1.")
        if not _is_number(weight) or not 0 <= weight < float("inf"):
            raise ConfigError(f"{example}; {weight!r} is not a weight, 0 or more.")
    total = sum(weight for _, weight in pairs)
    if needed and total <= 0:
        raise ConfigError(f"{example}; at least one weight must be above 0.")
    return tuple((tokens, weight / total) for tokens, weight in pairs if weight > 0)


def _shortest(longest: int) -> int:
    """The low end of a spread of lengths up to `longest`."""
    return min(SHORTEST_TOKENS, max(longest // 8, 1))


def _log_spread(low: int, high: int) -> Histogram:
    ratio = high / low
    return tuple((int(low * ratio ** ((i + 0.5) / NUM_LENGTHS)), 1 / NUM_LENGTHS) for i in range(NUM_LENGTHS))
