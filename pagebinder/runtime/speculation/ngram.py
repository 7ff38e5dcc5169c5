"""Prompt lookup (Saxena, 2023): what followed the last tokens when the request had them before.

    ... def main ( args ) : ... run ; def main          the last two came before at "def main":
                  ^^^^^^^^^                              guess "( args ) :"

Costs a few dictionary lookups. It guesses well where answers repeat their prompt: code, edits, summaries, extraction.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagebinder.errors import ConfigError
from pagebinder.runtime.speculation.drafter import DraftRequest


class _Index:
    """Where the n-grams of one request ended last, for each n; grows with its tokens."""

    def __init__(self, sizes: range) -> None:
        self.num_tokens = 0
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in all n-grams that end before the last token: those that end with it have nothing behind them."""
        for n, ends in self._ends.items():
            for end in range(max(self.num_tokens, n), len(tokens)):
                ends[tuple(tokens[end - n : end])] = end
        self.num_tokens = len(tokens)

    def end_of_longest(self, tokens: Sequence[int]) -> int | None:
        """Where the longest n-gram that the tokens end with ended before."""
        for n, ends in self._ends.items():
            if len(tokens) > n and (end := ends.get(tuple(tokens[-n:]))) is not None:
                return end
        return None


class NgramDrafter:
    """Guesses what followed the longest n-gram, of `shortest` to `longest` tokens, that occurred before, at its last
    place.

    Raises:
        ConfigError: not 1 <= shortest <= longest.
    """

    def __init__(self, *, longest: int = 4, shortest: int = 2) -> None:
        sizes_ok = all(isinstance(n, int) and not isinstance(n, bool) for n in (longest, shortest))
        if not sizes_ok or not 1 <= shortest <= longest:
            raise ConfigError(
                f"n-grams of {shortest!r} to {longest!r} tokens: use whole numbers, 1 <= shortest <= longest."
            )
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[str, _Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._one(request) for request in requests]

    def forget(self, key: str) -> None:
        self._indices.pop(key, None)

    def _one(self, request: DraftRequest) -> list[int]:
        tokens = request.token_ids
        index = self._indices.get(request.key)
        if index is None or index.num_tokens > len(tokens):  # the key is another request's now
            index = self._indices[request.key] = _Index(self._sizes)
        index.extend(tokens)
        end = index.end_of_longest(tokens)
        if end is None:
            return []
        # Where what follows runs into the end it repeats itself, as the tokens do.
        period = len(tokens) - end
        return [tokens[end + i % period] for i in range(request.most)]
