"""Ctrl-C, timeouts and other signals at a safe moment: books that are half changed must not be left that way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable

# They stop programs. Handlers of others, of profilers' timers above all, run at once.
DEFERRED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGVTALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


class deferred_interrupts(contextlib.ContextDecorator):
    """Handlers of `DEFERRED` signals that arrive inside the block run when it is done: they may raise.

    Signals reach Python in the main thread only, so elsewhere there is nothing to defer. Of nested blocks the
    outermost one does the work; `@deferred_interrupts()` makes a whole method one.
    """

    _depth = 0  # blocks that the main thread is in
    _handlers: dict[int, Callable] = {}
    _arrived: dict[int, object] = {}

    def __enter__(self) -> deferred_interrupts:
        cls = deferred_interrupts
        if threading.current_thread() is threading.main_thread():
            if not cls._depth:
                cls._arrived, cls._handlers = {}, _handlers_of_python(cls._handlers)
                for number in cls._handlers:
                    signal.signal(number, _note)
            cls._depth += 1  # since the line before nothing can interrupt
        return self

    def __exit__(self, *error: object) -> None:
        cls = deferred_interrupts
        if threading.current_thread() is threading.main_thread():
            try:
                cls._depth -= 1
                if not cls._depth:
                    # Handlers run at once again. So one may raise in this loop: `_note` stays in the place of others.
                    for number, handler in cls._handlers.items():
                        signal.signal(number, handler)
            finally:
                if not cls._depth:
                    due, cls._arrived = list(cls._arrived.items()), {}
                    _run_all(due)

    @property
    def pending(self) -> bool:
        """Will a handler run when this thread's outermost block is done?"""
        in_main = threading.current_thread() is threading.main_thread()
        return in_main and self._depth > 0 and bool(self._arrived)


def _note(number: int, frame: object) -> None:
    if deferred_interrupts._depth:
        deferred_interrupts._arrived.setdefault(number, frame)
    else:
        deferred_interrupts._handlers[number](number, frame)


def _handlers_of_python(known: dict[int, Callable]) -> dict[int, Callable]:
    """What `DEFERRED` signals call now; `known`: where that is still `_note`."""
    now = {number: signal.getsignal(number) for number in DEFERRED}
    return {number: known[number] if h is _note else h for number, h in now.items() if callable(h)}


def _run_all(due: list[tuple[int, object]]) -> None:
    """Runs the handlers of signals that arrived, the rest even if one raises."""
    if not due:
        return
    number, frame = due[0]
    try:
        deferred_interrupts._handlers[number](number, frame)
    finally:
        _run_all(due[1:])
