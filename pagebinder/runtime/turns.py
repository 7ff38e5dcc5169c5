"""Threads that use one engine take turns: a step or a change at a time.

In a process that was made by fork(), whose parent kept torch's threads, torch's ops of a turn stay in its thread. A
fork waits for all turns: the child would inherit half a step, and a lock of a thread that it does not have.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable

import torch

from pagebinder.custom_ops.cpu.torch_threads import torch_threads
from pagebinder.forks import threads_are_the_parents
from pagebinder.interrupts import deferred_interrupts


class Turns:
    """A lock that goes to whoever waits, before a thread that gives it back gets it again. May be nested.

    A plain lock would mostly stay with the thread that steps: it asks again before the others are awake.
    """

    def __init__(self) -> None:
        self._next, self._turn = threading.RLock(), threading.RLock()  # a finaliser may come in between
        self._owner: int | None = None
        _all.add(self)

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
        self._alone: contextlib.AbstractContextManager | None = None

    def __enter__(self) -> None:
        if not self._nested:
            try:
                self._turns.take()
            except BaseException:  # Ctrl-C while it waited
                self._leave()
                raise
            if threads_are_the_parents():
                self._alone = _torch_in_this_thread()
                self._alone.__enter__()

    def __exit__(self, *error: object) -> None:
        if not self._nested:
            if self._alone is not None:
                self._alone.__exit__(None, None, None)
            self._leave()

    def _leave(self) -> None:
        if self._turns.is_mine():
            self._turns.give_back()


@contextlib.contextmanager
def _torch_in_this_thread():
    """Kernels of ours go on using all threads, if they are there."""
    if hasattr(torch.ops.pagebinder_cpu, "limit_torch_threads"):
        with torch_threads(limited=True):
            yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_all: weakref.WeakSet[Turns] = weakref.WeakSet()
_held_by_a_fork: list[Turns] = []


def in_turn(method: Callable) -> Callable:
    """A method of an engine that no other thread interrupts, nor a signal."""

    @functools.wraps(method)
    def alone(self, *args, **options):
        with deferred_interrupts(), self._turns.taken():
            return method(self, *args, **options)

    return alone


def _before_fork() -> None:
    for turns in sorted(_all, key=id):
        if not turns.is_mine():
            turns.take()
            _held_by_a_fork.append(turns)


def _after_fork() -> None:
    while _held_by_a_fork:
        _held_by_a_fork.pop().give_back()


def _in_child() -> None:
    for turns in _all:
        turns._next = threading.RLock()  # threads that waited stayed with the parent
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
