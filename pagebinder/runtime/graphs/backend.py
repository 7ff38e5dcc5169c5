"""What a device must offer for steps to be captured: buffers at fixed addresses, and capture and replay of calls.

staging (host, pinned)  --one copy-->  static (device)  -->  graph.replay()  -->  outputs, at the addresses of capture
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

Tensors = Sequence[torch.Tensor]


class CapturedGraph(Protocol):
    """A captured call. Its outputs are the tensors that `capture` returned: each replay overwrites them."""

    def replay(self) -> None: ...


class Staging(Protocol):
    """Host memory that one step's metadata is written to: `array` is uint8.

    `wait` returns when the last upload from it is done; before that it must not be written.
    """

    array: np.ndarray

    def wait(self) -> None: ...


class GraphBackend(Protocol):
    """Captures calls on one device. All graphs of a backend share one pool of memory: they never run at once.

    `name`: "cpu" or "cuda". Order matters: the largest call first, so that the smaller ones find its memory.
    """

    name: str
    device: torch.device

    def static(self, num_bytes: int) -> torch.Tensor:
        """Device memory that stays where it is, uint8 zeros. Raises CacheCapacityError if it cannot be had."""
        ...

    def staging(self, num_bytes: int) -> Staging: ...

    def upload(self, staging: Staging, static: torch.Tensor, num_bytes: int) -> None:
        """Copy the first bytes of `staging` to `static` in one copy, in the order of the device's work."""
        ...

    def capture(
        self, call: Callable[[], Tensors], *, is_opaque: bool, held_bytes: int = 0
    ) -> tuple[CapturedGraph, Tensors]:
        """Capture a call that returns tensors; returns the graph and its outputs, which hold the call's values.

        `is_opaque`: what the call does cannot be seen op by op from Python (compiled code). `held_bytes`: what
        earlier captures of the same step have made and this one or a later one reads.
        Raises GraphCaptureError where the call reads device memory on the host.
        """
        ...

    def measured_bytes(self) -> int | None:
        """What capturing has taken on the device for intermediate values; None where nobody can tell."""
        ...

    def finish(self) -> None:
        """Called once, after the last capture."""
        ...


def graph_backend(device: torch.device) -> GraphBackend:
    """The backend of a device."""
    if device.type == "cuda":
        from pagebinder.runtime.graphs.cuda_backend import CudaGraphBackend

        return CudaGraphBackend(device)
    from pagebinder.runtime.graphs.cpu_backend import CpuGraphBackend

    return CpuGraphBackend(device)
