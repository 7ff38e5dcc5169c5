"""Ctrl-C at a safe moment: books that are half changed must not be left that way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable


class deferred_interrupts(contextlib.ContextDecorator):
    """SIGINT that arrives inside the block is delivered when the block is done.

    Signals reach Python in the main thread only, so elsewhere there is nothing to defer. Of nested blocks the
    outermost one does the work; `@deferred_interrupts()` makes a whole method one.
    """

    _depth = 0  # blocks that the main thread is in
    _handler: Callable | None = None  # what SIGINT called before
    _arrived: tuple | None = None

    def __enter__(self) -> deferred_interrupts:
        cls = deferred_interrupts
        if threading.current_thread() is threading.main_thread():
            if not cls._depth:
                handler = signal.getsignal(signal.SIGINT)
                cls._handler, cls._arrived = handler if callable(handler) else None, None
                if cls._handler is not None:
                    signal.signal(signal.SIGINT, _note)
            cls._depth += 1  # since the line before nothing can interrupt
        return self

    def __exit__(self, *error: object) -> None:
        cls = deferred_interrupts
        if threading.current_thread() is threading.main_thread():
            cls._depth -= 1
            if not cls._depth and cls._handler is not None:
                signal.signal(signal.SIGINT, cls._handler)
                if cls._arrived is not None:
                    cls._handler(*cls._arrived)

    @property
    def pending(self) -> bool:
        """Will an interrupt come when this thread's outermost block is done?"""
        in_main = threading.current_thread() is threading.main_thread()
        return in_main and self._depth > 0 and self._arrived is not None


def _note(*args: object) -> None:
    deferred_interrupts._arrived = args
