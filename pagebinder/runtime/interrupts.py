"""Ctrl-C at a safe moment: books that are half changed must not be left that way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """SIGINT that arrives inside the block is delivered when the block is done.

    Signals reach Python in the main thread only, so elsewhere there is nothing to defer. Blocks may be nested;
    `@deferred_interrupts()` makes a whole method one.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *args: arrived.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[-1])
