"""Threads that use one engine take turns: a step or a change at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pagebinder.runtime.interrupts import deferred_interrupts


class Turns:
    """A lock that goes to whoever waits, before a thread that gives it back gets it again. May be nested.

    A plain lock would mostly stay with the thread that steps: it asks again before the others are awake.
    """

    def __init__(self) -> None:
        self._next, self._turn = threading.RLock(), threading.RLock()  # a finaliser may come in between
        self._owner: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        me = threading.get_ident()
        if self._owner == me:
            yield
            return
        try:
            # The one who comes next waits for the turn, the others behind it.
            with deferred_interrupts(), self._next:
                self._turn.acquire()
                self._owner = me
            yield
        finally:
            if self._owner == me:
                with deferred_interrupts():
                    self._owner = None
                    self._turn.release()
