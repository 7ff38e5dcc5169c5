"""Freed memory that the process keeps: a step's tensors are freed at its end, and needed by the next step.

glibc gives the end of its heap back to the system when more than some MB of it are free, and takes it again page by
page: a step of 1,024 prompt tokens of a 0.6B model made 5,000 pages, 3 % of its time (docs/measurements.md, on
2026-11-27).
"""

from __future__ import annotations

import ctypes
import functools
import os

MMAP_BYTES = 32 << 20  # larger tensors get a mapping of their own, as ever; glibc's own limit
KEPT_BYTES = 256 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Ask malloc to keep up to KEPT_BYTES of freed memory for this process, once.

    Returns False, and nothing is changed, where the C library has no such setting (musl, macOS) or the user has set
    malloc's own variables.
    """
    if any(name in os.environ for name in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def give_back_freed_memory() -> None:
    """Ask malloc to give the system what is free between what is used: behind work that will not be done again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
