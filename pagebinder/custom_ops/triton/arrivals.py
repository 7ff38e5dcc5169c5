"""Where programs of a launch count how many of them have ended, so that the last one can go on with what all left."""

from __future__ import annotations

import threading

import torch
import triton

LEAST = 1024  # a few KiB for each cache
_lock = threading.Lock()
# Address of a cache -> what was made for it, the last the largest. Captured graphs may hold them, so they stay.
_made: dict[int, list[torch.Tensor]] = {}


def arrivals_at(cache: torch.Tensor, number: int) -> torch.Tensor | None:
    """At least `number` zeros, int32, which each launch leaves as zeros again. None where they would have to be made
    while a graph is captured: only that graph's replays would begin with zeros.

    Each cache has its own: launches that read one cache follow each other, those over others may run beside them.
    """
    if cache.device.type == "meta":  # what is kept here is no part of a graph's memory
        return torch.empty(0, dtype=torch.int32, device="meta")
    if cache.device.type != "cuda":
        return torch.zeros(number, dtype=torch.int32, device=cache.device)
    with _lock:
        made = _made.setdefault(cache.data_ptr(), [])
        if not made or len(made[-1]) < number:
            if torch.cuda.is_current_stream_capturing():
                return None
            size = max(LEAST, triton.next_power_of_2(number))
            made.append(torch.zeros(size, dtype=torch.int32, device=cache.device))
        return made[-1]
