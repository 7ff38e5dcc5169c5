"""What runs launches on two streams: a small interface, and CUDA's streams behind it.

`SimulatedStreams` (`simulated.py`) is the other implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from pagebinder.runtime.streams.branches import MAIN


class StreamOrderError(RuntimeError):
    """A launch ran before what it reads was made, or after that was dropped: a fault of the schedule."""


class StreamRun(Protocol):
    """One run of a graph. Events have numbers, and each is recorded before it is waited for, in the host's order; all
    calls are made in that order."""

    def record(self, stream: int, event: int) -> None:
        """The event happens when all that was launched on the stream so far is done."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """What is launched on the stream from now on begins when the event has happened."""
        ...

    def launch(self, stream: int, call: Callable[[], None]) -> None:
        """Launch what `call` launches; memory that it allocates belongs to the stream."""
        ...

    def drop(self, owners: tuple[int, ...], name: str) -> None:
        """Forget a value: streams that own its memory may use it for what is launched on them from now on."""
        ...


class Streams(Protocol):
    """Two streams: MAIN, the caller's current one, and SIDE. `one_by_one`: see `StreamedGraph`."""

    name: str
    one_by_one: bool

    def run(self, values: dict[str, object]) -> AbstractContextManager[StreamRun]:
        """A run; when it is left without an error, the results are the main stream's. `values`: what its launches
        read and make, by name."""
        ...


class CudaStreams:
    """CUDA's streams; `make gpu` runs their tests.

    MAIN is the stream that is current when a graph is called. In a capture that is the capturing one: the side's
    first wait makes it part of the capture, the join at the end brings it back, and memory of both comes from the
    capture's pool. Events are made anew for each run: one that was recorded in a capture means nothing outside of it.
    """

    name, one_by_one = "cuda", False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Made here: no stream can be created inside a capture.
        self._side = torch.cuda.Stream(device)

    def run(self, values: dict[str, object]) -> _CudaRun:
        return _CudaRun(torch.cuda.current_stream(self.device), self._side, values)


class _CudaRun:
    def __init__(self, main: torch.cuda.Stream, side: torch.cuda.Stream, values: dict[str, object]) -> None:
        self._streams, self._values = (main, side), values
        self._events: dict[int, torch.cuda.Event] = {}
        self._has_side = False

    def __enter__(self) -> _CudaRun:
        return self

    def __exit__(self, kind, error, trace) -> None:
        # Values are dropped now: whatever the side is still doing must be over before their memory is used again. A
        # capture that has failed does nothing any more, and asking it to wait would hide why it failed.
        if kind is not None and self._has_side and not torch.cuda.is_current_stream_capturing():
            self._streams[0].wait_stream(self._streams[1])

    def record(self, stream: int, event: int) -> None:
        self._events[event] = torch.cuda.Event()
        self._events[event].record(self._streams[stream])

    def wait(self, stream: int, event: int) -> None:
        self._has_side = True
        self._streams[stream].wait_event(self._events[event])

    def launch(self, stream: int, call: Callable[[], None]) -> None:
        if stream == MAIN:
            call()
        else:
            with torch.cuda.stream(self._streams[stream]):
                call()

    def drop(self, owners: tuple[int, ...], name: str) -> None:
        del self._values[name]
