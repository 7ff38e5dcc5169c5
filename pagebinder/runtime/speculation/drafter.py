"""What guesses the next tokens of requests. Guesses change how many steps there are, and no token that comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request whose next tokens are to be guessed.

    key: names the request among those of all engines; request_id: the engine's name for it. token_ids: prompt and
    output so far; it grows by what the request is given, and must not be changed. most: how many tokens are wanted at
    most. limit: tokens that it will have at most in the end.
    """

    key: str
    request_id: str
    token_ids: Sequence[int]
    most: int
    limit: int


class NoDrafter:
    """Guesses nothing: what guides force is all that is guessed."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[] for _ in requests]

    def forget(self, key: str) -> None:
        pass


class Drafter(Protocol):
    """Guesses tokens. Several engines may share one, a step at a time: no two threads may step them at once."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """For each request its likely next token ids, none where nothing is known. What is beyond `most` is not
        used. What it raises, the engine's step raises; the next one asks again. It may abort requests."""

    def forget(self, key: str) -> None:
        """The request is over: drop what is kept of it. Also called for requests that were never asked for."""
