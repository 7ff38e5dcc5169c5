"""`SamplingParams(guide=...)` at work: which tokens may come next, and where a text has come to its end.

    tokens so far   { " a " :        allowed: digits, white space, "-"
    guesses         1 7 x            2 of them are allowed
    1 2 }                            nothing may follow: the text ends

A guide is asked with all tokens of the output, so a step that is repeated, a fork, or guesses that failed need no
bookkeeping: it goes back to what both texts share.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from pagebinder.config_checks import short_repr
from pagebinder.errors import RequestError

logger = logging.getLogger("pagebinder")

KEPT_ANSWERS = 16  # of a function, for states of one request: 150 KB each where a vocabulary is large
_SHOWN_CHARS = 400


class Guide(Protocol):
    """Of one request. `token_ids`: its output so far."""

    def allowed(self, token_ids: list[int]) -> np.ndarray | None:
        """[<= V] bool, tokens beyond are not allowed; None: any token is."""

    def num_allowed(self, token_ids: list[int], guesses: Sequence[int]) -> int:
        """How many of the guessed tokens, the first ones, may follow."""

    def forced(self, token_ids: list[int], most: int) -> list[int]:
        """Tokens, `most` at most, of which the guide says that they will follow: good guesses."""

    def ends_after(self, token_ids: list[int]) -> bool:
        """Nothing may follow any more: the text is complete, or `error` says why the guide cannot go on."""

    error: str


class GrammarGuide:
    """A matcher of llguidance. `fresh`: one that has seen nothing, which is copied; it may know more tokens than the
    `vocab_size` that have logits."""

    def __init__(self, fresh: Any, vocab_size: int) -> None:
        self._fresh, self._matcher, self._vocab_size = fresh, fresh.deep_copy(), vocab_size
        self._taken: list[int] = []
        self.error = ""

    def allowed(self, token_ids: list[int]) -> np.ndarray:
        self._go_to(token_ids)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._note_error()
        return np.unpackbits(mask, bitorder="little").view(bool)[: self._vocab_size]

    def num_allowed(self, token_ids: list[int], guesses: Sequence[int]) -> int:
        self._go_to(token_ids)
        return self._matcher.validate_tokens(list(guesses))

    def forced(self, token_ids: list[int], most: int) -> list[int]:
        """As the tokenizer would write the bytes that must come."""
        self._go_to(token_ids)
        return self._matcher.compute_ff_tokens()[:most]

    def ends_after(self, token_ids: list[int]) -> bool:
        if not self.error:
            self._go_to(token_ids)
            self._note_error()
        return bool(self.error) or self._matcher.is_stopped()

    def _go_to(self, token_ids: list[int]) -> None:
        taken = self._taken
        if token_ids[: len(taken)] != taken:
            shared = next(
                i for i, pair in enumerate(zip([*taken, -1], [*token_ids, -2])) if pair[0] != pair[1]
            )
            if not self._matcher.rollback(len(taken) - shared) or self._matcher.is_error():
                self._matcher, shared = self._fresh.deep_copy(), 0
            del taken[shared:]
        if len(token_ids) > len(taken):
            self._matcher.consume_tokens(token_ids[len(taken) :])
            self._taken = list(token_ids)

    def _note_error(self) -> None:
        if self._matcher.is_error() and not self.error:
            self.error = shortened(self._matcher.get_error())
            logger.warning("a guide gave up, and its request ends: %s", self.error)


class FunctionGuide:
    """A function of the user's own, with what it answered lately. Raises what it raises, and RequestError where the
    answer is none."""

    error = ""

    def __init__(self, function: Callable[[list[int]], Any], vocab_size: int) -> None:
        self._function, self._vocab_size = function, vocab_size
        self.owner = ""  # the request's id, once it is one of the engine's
        self._answers: OrderedDict[tuple[int, ...], np.ndarray | None] = OrderedDict()

    def allowed(self, token_ids: list[int]) -> np.ndarray | None:
        key = tuple(token_ids)
        if key not in self._answers:
            try:
                self._answers[key] = self._mask(self._function(list(token_ids)))
            except Exception as error:
                if self.owner:
                    error.add_note(
                        f"(in the guide of request {self.owner!r}; once that is aborted, the others go on)"
                    )
                raise
            while len(self._answers) > KEPT_ANSWERS:
                self._answers.popitem(last=False)
        return self._answers[key]

    def num_allowed(self, token_ids: list[int], guesses: Sequence[int]) -> int:
        for count, token in enumerate(guesses):
            allowed = self.allowed([*token_ids, *guesses[:count]])
            if allowed is not None and not (token < len(allowed) and allowed[token]):
                return count
        return len(guesses)

    def forced(self, token_ids: list[int], most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most:
            allowed = self.allowed([*token_ids, *found])
            if allowed is None or allowed.sum() != 1:
                break
            found.append(int(allowed.argmax()))
        return found

    def ends_after(self, token_ids: list[int]) -> bool:
        allowed = self.allowed(token_ids)
        return allowed is not None and not allowed.any()

    def _mask(self, answer: Any) -> np.ndarray | None:
        if answer is None:
            return None
        if hasattr(answer, "tolist") and hasattr(answer, "cpu"):
            answer = answer.detach().cpu().numpy()
        try:
            array = np.asarray(list(answer) if isinstance(answer, Collection) else answer)
        except (TypeError, ValueError):
            array = np.empty((0, 0))
        if array.dtype == bool and array.shape == (self._vocab_size,):
            return array.copy()
        if array.size == 0 and array.ndim == 1:
            return np.zeros(self._vocab_size, bool)
        if (
            array.shape == (self._vocab_size,)
            and array.dtype.kind in "iu"
            and array.max() <= 1 < array.size - 1
        ):
            array = np.empty((0, 0))  # zeros and ones for all tokens are meant as a mask, which is of bools
        are_ids = array.ndim == 1 and array.dtype.kind in "iu"
        if are_ids and array.min() >= 0 and array.max() < self._vocab_size:
            mask = np.zeros(self._vocab_size, bool)
            mask[array] = True
            return mask
        raise RequestError(
            f"A guide answered {short_repr(answer)}: token ids from 0 to {self._vocab_size - 1} are wanted, a mask "
            f"of [{self._vocab_size}] bools, or None."
        )


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
