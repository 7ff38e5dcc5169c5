"""Threads that use one engine take turns: a step or a change at a time."""

from __future__ import annotations

import threading

from pagebinder.runtime.interrupts import deferred_interrupts


class Turns:
    """A lock that goes to whoever waits, before a thread that gives it back gets it again. May be nested.

    A plain lock would mostly stay with the thread that steps: it asks again before the others are awake.
    """

    def __init__(self) -> None:
        self._next, self._turn = threading.RLock(), threading.RLock()  # a finaliser may come in between
        self._owner: int | None = None

    def taken(self) -> _Turn:
        """A block in which the turn is this thread's."""
        return _Turn(self)

    def is_mine(self) -> bool:
        return self._owner == threading.get_ident()

    def take(self) -> None:
        """Wait for the turn. The one who comes next waits for it, the others behind that one."""
        with deferred_interrupts(), self._next:
            self._turn.acquire()
            self._owner = threading.get_ident()

    def give_back(self) -> None:
        with deferred_interrupts():
            self._owner = None
            self._turn.release()


class _Turn:
    """A class, not a generator, which costs some us of each step."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._nested = turns, turns.is_mine()

    def __enter__(self) -> None:
        if not self._nested:
            try:
                self._turns.take()
            except BaseException:  # Ctrl-C while it waited
                self._leave()
                raise

    def __exit__(self, *error: object) -> None:
        if not self._nested:
            self._leave()

    def _leave(self) -> None:
        if self._turns.is_mine():
            self._turns.give_back()
