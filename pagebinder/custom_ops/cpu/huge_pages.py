"""Huge pages of 2 MB: for KV memory, as blocks in random order cost a page walk each, and for weights, as the
processor's prefetcher stops at the end of a page (33 instead of 28 GB/s for one row of a linear layer).

`benchmarks/paged_attention.py`, with and without `--small-pages`, measures it on shuffled blocks of 16 tokens.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

HUGE_PAGE_BYTES = 2 * 1024 * 1024
MOST_SHARE = 0.5  # of the memory that is available
ALIGNMENT = 64


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


def move_to_huge_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Copy the memory of contiguous CPU tensors of 2 MB and more into huge pages and let the tensors point there.

    Tensors that share memory do so afterwards if they are the same view of it. Where they came from is free again
    once nobody else refers to it. Nothing is done where there is no room, or no huge pages. Returns the bytes that
    were moved.
    """
    views: dict[tuple, list[torch.Tensor]] = {}
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if tensor.device.type == "cpu" and tensor.is_contiguous() and num_bytes >= HUGE_PAGE_BYTES:
            views.setdefault((tensor.data_ptr(), num_bytes), []).append(tensor)
    places, is_huge = memory_for([num_bytes for _, num_bytes in views])
    if not is_huge:
        return 0
    for place, same in zip(places, views.values(), strict=True):
        place.copy_(same[0].detach().reshape(-1).view(torch.uint8))
        for tensor in same:
            tensor.data = place.view(tensor.dtype).view(tensor.shape)
    return sum(place.numel() for place in places)


def memory_for(sizes: Sequence[int]) -> tuple[list[torch.Tensor], bool]:
    """For each size that many bytes (uint8), in one piece of memory; and is it in huge pages?

    No memory at all, ([], False), where it would be more than half of what is available.
    """
    ends = list(itertools.accumulate(size + -size % ALIGNMENT for size in sizes))
    if not ends or ends[-1] > MOST_SHARE * _available_bytes():
        return [], False
    memory = untouched_zeros(ends[-1])
    is_huge = advise_huge_pages(memory)
    begins = [0, *ends]
    return [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)], is_huge


def _available_bytes() -> int:
    """Memory that can be had without swapping; 0 where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
