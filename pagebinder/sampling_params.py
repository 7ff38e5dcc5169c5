"""How the tokens of one request are chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagebinder.config_checks import (
    check_unicode,
    is_int,
    is_number,
    plain_number,
    require,
    short_repr,
    strict,
)
from pagebinder.errors import RequestError
from pagebinder.guides import GUIDES, Choice, Grammar, JsonSchema, Regex

# Of a prompt: a request with millions of them would hold up all others.
MOST_SAMPLES, MOST_STOP_STRINGS = 16384, 256
MOST_PENALTY = 100.0
MOST_ID_DIGITS = 20  # of a token id as text: int() reads some thousand


@strict(RequestError)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Steps, in this order: guide, `suppress_tokens`, `min_tokens`, logit bias, repetition penalty, frequency and
    presence penalty, temperature, top-k, top-p, min-p, one draw.

    Args:
        max_tokens: tokens to generate at most; None = up to the model's length.
        min_tokens: no end-of-sequence or stop token before so many; guides and stop strings end it all the same.
        temperature: 0.0 is greedy. top_k: 0 = off. top_p: keeps the smallest set with that mass.
        min_p: drops tokens below min_p times the largest probability.
        repetition_penalty: > 1 makes tokens of the prompt and the output less likely (Keskar et al., 2019).
        frequency_penalty, presence_penalty: taken off a token's logit for each time that it is in the output, and
            once if it is there at all (OpenAI's API); the prompt does not count.
        suppress_tokens: ids of tokens that are never chosen (where a guide allows no other, they are).
        logit_bias: token id -> what is added to its logit, -100 to 100.
        guide: what the text must look like: `JsonSchema`, `Regex`, `Choice`, `Grammar`, or a function (`guides.py`).
        seed: the same seed gives the same tokens, whatever else runs in the batch: in float32; in bf16 up to
            near-ties of one rounding, as layers may sum otherwise in a step of more tokens.
        stop: strings that end the text (not part of it), MOST_STOP_STRINGS at most.
        stop_token_ids: tokens that end it.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: number of most likely tokens to report at each position (0 = only the chosen one's).
        n: samples per prompt, at most MOST_SAMPLES.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    suppress_tokens: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    guide: JsonSchema | Regex | Choice | Grammar | Callable[[list[int]], Any] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self):
        def check(condition, message):
            require(bool(condition), RequestError, message)

        check(
            self.stop is None or isinstance(self.stop, (str, list, tuple)),
            f"stop={self.stop!r}: use strings.",
        )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        check(all(isinstance(s, str) and s for s in stop), f"stop={self.stop!r}: use non-empty strings.")
        for text in stop:
            check_unicode(text, "stop string")
        check(len(stop) <= MOST_STOP_STRINGS, f"{len(stop):,} stop strings: use {MOST_STOP_STRINGS} at most.")
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "suppress_tokens"):
            ids = getattr(self, name)
            check(
                ids is None or isinstance(ids, (list, tuple, set, frozenset)),
                f"{name}={short_repr(ids)}: use a list.",
            )
            ids = tuple(ids or ())
            check(
                all(is_int(t) and t >= 0 for t in ids),
                f"{name}={short_repr(ids)}: use token ids, 0 or more.",
            )
            object.__setattr__(self, name, ids)
        check(isinstance(self.ignore_eos, bool), f"ignore_eos={self.ignore_eos!r}: use True or False.")
        max_tokens = self.max_tokens
        check(max_tokens is None or (is_int(max_tokens) and max_tokens >= 1),
              f"max_tokens={max_tokens!r}: use at least 1, or None for the model's length.")  # fmt: skip
        check(is_number(self.temperature) and self.temperature >= 0.0,
              f"temperature={self.temperature!r}: use 0.0 (greedy) or more.")  # fmt: skip
        check(is_int(self.top_k) and self.top_k >= 0, f"top_k={self.top_k!r}: use 0 (off) or more.")
        check(is_number(self.top_p) and 0.0 < self.top_p <= 1.0, f"top_p={self.top_p!r}: use 0 < top_p <= 1.")
        check(
            is_number(self.min_p) and 0.0 <= self.min_p <= 1.0, f"min_p={self.min_p!r}: use 0 <= min_p <= 1."
        )
        check(is_number(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100.0,
              f"repetition_penalty={self.repetition_penalty!r}: use 0.01 to 100 (1.0 = off).")  # fmt: skip
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            check(is_number(value) and abs(value) <= MOST_PENALTY,
                  f"{name}={value!r}: use {-MOST_PENALTY} to {MOST_PENALTY} (0.0 = off).")  # fmt: skip
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        ok = self.guide is None or (callable(self.guide) and not isinstance(self.guide, type))
        check(ok or isinstance(self.guide, GUIDES), _no_guide(self.guide))
        most = self.max_tokens
        check(
            is_int(self.min_tokens) and self.min_tokens >= 0,
            f"min_tokens={self.min_tokens!r}: use 0 or more.",
        )
        check(
            most is None or self.min_tokens <= most,
            f"min_tokens={self.min_tokens} is more than max_tokens={most}.",
        )
        check(self.seed is None or is_int(self.seed), f"seed={self.seed!r}: use a whole number or None.")
        check(self.logprobs is None or (is_int(self.logprobs) and self.logprobs >= 0),
              f"logprobs={self.logprobs!r}: use 0 or more, or None.")  # fmt: skip
        check(is_int(self.n) and 1 <= self.n <= MOST_SAMPLES, f"n={self.n!r}: use 1 to {MOST_SAMPLES}.")


class ReadOnlyDict(dict):
    """Requests that run read it, so a change would go unchecked. Pickle, copy and json take it, which do not take a
    `types.MappingProxyType`."""

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("Sampling parameters do not change; make others: dataclasses.replace(params, ...).")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict]]:
        return ReadOnlyDict, (dict(self),)


def _checked_bias(bias: Any) -> ReadOnlyDict:
    """A copy with whole numbers as keys, which JSON has as texts. Raises RequestError."""
    if not isinstance(bias, Mapping | None):
        raise RequestError(f"logit_bias={bias!r}: use a dict, token id -> what is added to its logit.")
    checked: dict[int, float] = {}
    for token, value in (bias or {}).items():
        token, value = plain_number(token), plain_number(value)
        if isinstance(token, str) and token.isdecimal() and len(token) <= MOST_ID_DIGITS:
            token = int(token)
        if not (is_int(token) and token >= 0):
            raise RequestError(f"logit_bias is for token ids, 0 or more, not for {short_repr(token)}.")
        if not (is_number(value) and abs(value) <= MOST_PENALTY):
            raise RequestError(
                f"logit_bias of token {short_repr(token)} is {short_repr(value)}: use {-MOST_PENALTY} to "
                f"{MOST_PENALTY}."
            )
        checked[token] = float(value)
    return ReadOnlyDict(checked)


def _no_guide(guide: Any) -> str:
    hint = ""
    if isinstance(guide, (Mapping, str)):
        hint = "; a schema goes into JsonSchema(...), a pattern into Regex(...)"
    elif isinstance(guide, type):
        hint = f"; give one of its objects, or JsonSchema({guide.__name__}) for a pydantic model"
    return f"guide={guide!r}: use JsonSchema, Regex, Choice, Grammar or a function{hint}."
