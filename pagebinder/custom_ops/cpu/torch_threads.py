"""How many threads torch's own loops use while ours use all: cpu/num_threads.h says why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pagebinder.forks import threads_are_the_parents


@contextlib.contextmanager
def torch_threads(*, limited: bool) -> Iterator[None]:
    """Torch's loops that this thread calls stay in this thread, or use all threads again, unless they stayed with the
    parent of a fork. The core part is loaded. Loops of ours use torch.get_num_threads() in any case."""
    if not limited and threads_are_the_parents():
        yield
        return
    limit, before = torch.ops.pagebinder_cpu.limit_torch_threads.default, False
    try:
        before = limit(limited)
        yield
    finally:
        limit(before)
