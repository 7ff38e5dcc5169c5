"""Huge pages for KV memory: blocks in random order cost a page walk each, so pages of 2 MB pay off.

`benchmarks/paged_attention.py`, with and without `--small-pages`, measures it on shuffled blocks of 16 tokens.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

HUGE_PAGE_BYTES = 2 * 1024 * 1024


def untouched_zeros(num_bytes: int) -> torch.Tensor:
    """Zeros [num_bytes] uint8 on the CPU, in pages that are made when they are first touched: torch.zeros writes all
    of them, which takes 0.4 s a GB, and in small pages. Raises OSError, OverflowError: there is not so much memory.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def advise_huge_pages(memory: torch.Tensor) -> bool:
    """Ask the kernel to back a CPU tensor's storage with huge pages; call it before the memory is first touched.

    Returns False where that is not possible (not Linux, no CPU tensor, too small, refused by the kernel): nothing
    is lost then.
    """
    if memory.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    begin = memory.untyped_storage().data_ptr()
    end = begin + memory.untyped_storage().nbytes()
    begin = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - begin
    if length <= 0:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    return madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_HUGEPAGE)) == 0
