"""Two streams on a CPU: a run's launches are queued, and then run in any order that its events allow.

    host's order     f  record e0  |  wait e0, b1, record e1  |  a1  |  wait e1, j
    one order        f  b1  a1  j          main: f a1 j      side: b1
    another          f  a1  b1  j

Orders are drawn by a seed, and lean to the one stream, to the other, or to neither. Nothing but events holds a stream
back, so a schedule that lacks one gives another result, or none, for some seed. What the host drops is gone when a
stream that owns its memory reaches that point, as its next launch may be given the memory.

There is nothing to gain in speed: one launch runs at a time.

What is recorded meanwhile (`runtime/graphs`) is told the host's order, by which memory is taken and given back: it is
the same for all orders of running.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pagebinder.runtime.streams.branches import MAIN, SIDE
from pagebinder.runtime.streams.streams import StreamOrderError

LEANINGS = (0.0, 1.0, 0.5)  # probabilities of the side stream, where both may go on


class Watcher(Protocol):
    """A dispatch mode that wants to know when and where the host launches what it sees."""

    def next_place(self) -> int:
        """The next number in the host's order."""
        ...

    def launch_at(self, place: int, stream: int) -> None:
        """Ops from now on are launched there."""
        ...

    def hold(self, value: object, place: int) -> None:
        """The host keeps a value until there, whoever reads it last."""
        ...


class SimulatedStreams:
    """Each run gets an order of its own: the first two lean to the main and to the side stream altogether.

    `one_by_one`: see `StreamedGraph`.
    """

    name = "simulated"

    def __init__(self, seed: int = 0, *, one_by_one: bool = True) -> None:
        self._next_seed, self.one_by_one = seed, one_by_one

    def run(self, values: dict[str, object]) -> _SimulatedRun:
        self._next_seed += 1
        modes = reversed(_get_current_dispatch_mode_stack())
        watcher = next((mode for mode in modes if hasattr(mode, "launch_at")), _Nobody())
        return _SimulatedRun(self._next_seed - 1, values, watcher)


class _Nobody:
    """Watches nothing."""

    def next_place(self) -> int:
        return 0

    def launch_at(self, place: int, stream: int) -> None:
        pass

    def hold(self, value: object, place: int) -> None:
        pass


class _SimulatedRun:
    def __init__(self, seed: int, values: dict[str, object], watcher: Watcher) -> None:
        self._values, self._watcher = values, watcher
        self._random = random.Random(seed)
        self._to_side = LEANINGS[seed % len(LEANINGS)]
        self._queues: tuple[deque, deque] = (deque(), deque())
        self._happened: set[int] = set()

    def __enter__(self) -> _SimulatedRun:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self._drain()
        end = self._watcher.next_place()
        for value in self._values.values():
            self._watcher.hold(value, end)
        self._watcher.launch_at(end, MAIN)

    def record(self, stream: int, event: int) -> None:
        self._queues[stream].append((None, lambda: self._happened.add(event)))

    def wait(self, stream: int, event: int) -> None:
        self._queues[stream].append((event, lambda: None))

    def launch(self, stream: int, call: Callable[[], None]) -> None:
        place = self._watcher.next_place()

        def launched() -> None:
            self._watcher.launch_at(place, stream)
            call()

        self._queues[stream].append((None, launched))

    def drop(self, owners: tuple[int, ...], name: str) -> None:
        place = self._watcher.next_place()

        def dropped() -> None:
            if name in self._values:
                self._watcher.hold(self._values.pop(name), place)

        for owner in owners:
            self._queues[owner].append((None, dropped))

    def _drain(self) -> None:
        while any(self._queues):
            ready = [s for s in (MAIN, SIDE) if self._queues[s] and self._may_go_on(self._queues[s][0])]
            if not ready:
                raise StreamOrderError("Both streams wait for events that never happen.")
            stream = ready[0] if len(ready) == 1 else int(self._random.random() < self._to_side)
            self._queues[stream].popleft()[1]()

    def _may_go_on(self, entry: tuple) -> bool:
        return entry[0] is None or entry[0] in self._happened
