"""Huge pages of 2 MB: for KV memory, as blocks in random order cost a page walk each, and for weights, as the
processor's prefetcher stops at the end of a page (33 instead of 28 GB/s for one row of a linear layer).

Making pages takes from 0.1 s a GB to, on a virtual machine whose host gives memory only then, 5 s a GB. A thread does
it while the processor that it runs on has nothing else to do (`make_pages`, `MemoryAhead`).

`benchmarks/paged_attention.py`, with and without `--small-pages`, measures it on shuffled blocks of 16 tokens.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import mmap
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

HUGE_PAGE_BYTES = 2 * 1024 * 1024
MOST_SHARE = 0.5  # of the memory that is available
ALIGNMENT = 64
LOOK_AGAIN_SECONDS = 1.0  # whether memory is still there whose pages wait
MADV_POPULATE_WRITE = 23  # Linux 5.14: make pages, and leave what they hold

MemoryFor = Callable[[Sequence[int]], tuple[list[torch.Tensor], bool]]


def untouched_zeros(num_bytes: int) -> torch.Tensor:
    """Zeros [num_bytes] uint8 on the CPU, in pages that are made when they are first touched: torch.zeros writes all
    of them, which takes 0.4 s a GB, and in small pages. Raises OSError, OverflowError: there is not so much memory.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
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
    return _advise(begin, length, mmap.MADV_HUGEPAGE)


def make_pages(memory: torch.Tensor, idle: threading.Event | None = None) -> threading.Thread | None:
    """Make the pages of `untouched_zeros` in a thread, the first ones first, which stops when nobody has this tensor
    any more. The memory can be used meanwhile. None: this system does not make pages before they are touched.

    Args:
        idle: pages are made only while it is set: a thread that makes them takes a core from who computes.
    """
    of_memory = weakref.ref(memory)
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()

    def make(page: int) -> bool:
        return _advise(page, min(HUGE_PAGE_BYTES, end - page), MADV_POPULATE_WRITE)

    def work() -> None:
        for page in range(begin + HUGE_PAGE_BYTES, end, HUGE_PAGE_BYTES):
            while idle is not None and not idle.wait(LOOK_AGAIN_SECONDS) and of_memory() is not None:
                pass
            still_there = None if _exiting.is_set() else of_memory()  # for as long as its page is made
            if still_there is None or not make(page):
                return

    if not hasattr(mmap, "MADV_HUGEPAGE") or not make(begin):
        return None
    thread = threading.Thread(target=work, name="pagebinder-pages", daemon=True)
    thread.start()
    _threads[thread] = idle
    return thread


_threads: weakref.WeakKeyDictionary[threading.Thread, threading.Event | None] = weakref.WeakKeyDictionary()
_exiting = threading.Event()


@atexit.register
def _stop_threads() -> None:
    """Python ends daemon threads where they stand, which aborts within torch's C++: where a tensor is freed."""
    _exiting.set()
    for thread, idle in list(_threads.items()):
        if idle is not None:
            idle.set()
        thread.join(LOOK_AGAIN_SECONDS)


class MemoryAhead:
    """Memory for what will be laid out in a while. A thread makes its pages from now on, until the first are taken:
    who fills them then makes the rest, with more threads.

        |taken |taken    |free                    |
    """

    def __init__(self, num_bytes: int) -> None:
        places, _ = new_memory([num_bytes] if num_bytes else [])
        self._free = places[0] if places else torch.empty(0, dtype=torch.uint8, device="cpu")
        self._is_huge = bool(places) and advise_huge_pages(self._free)
        if self._is_huge:
            make_pages(self._free)

    def memory_for(self, sizes: Sequence[int]) -> tuple[list[torch.Tensor], bool]:
        """As `new_memory`, which serves what does not fit here."""
        ends = _ends(sizes)
        if not self._is_huge or not ends or ends[-1] > len(self._free):
            return new_memory(sizes)
        taken, self._free = self._free[: ends[-1]], self._free[ends[-1] :]
        return _places(taken, sizes, ends), True

    def close(self) -> None:
        """Give back what nobody took."""
        begin = -(-self._free.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        num_bytes = self._free.data_ptr() + self._free.numel() - begin
        self._free = self._free[:0]
        if self._is_huge and num_bytes > 0:
            _advise(begin, num_bytes, mmap.MADV_DONTNEED)


def _advise(begin: int, num_bytes: int, advice: int) -> bool:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    return madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), ctypes.c_int(advice)) == 0


def move_to_huge_pages(tensors: Iterable[torch.Tensor], memory_for: MemoryFor | None = None) -> int:
    """Copy the memory of contiguous CPU tensors of 2 MB and more into huge pages and let the tensors point there.

    Tensors that share memory do so afterwards if they are the same view of it. Where they came from is free again
    once nobody else refers to it. Nothing is done where there is no room, or no huge pages. Returns the bytes that
    were moved. `memory_for`: gives the memory.
    """
    views: dict[tuple, list[torch.Tensor]] = {}
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if tensor.device.type == "cpu" and tensor.is_contiguous() and num_bytes >= HUGE_PAGE_BYTES:
            views.setdefault((tensor.data_ptr(), num_bytes), []).append(tensor)
    places, is_huge = (memory_for or new_memory)([num_bytes for _, num_bytes in views])
    if not is_huge:
        return 0
    for place, same in zip(places, views.values(), strict=True):
        place.copy_(same[0].detach().reshape(-1).view(torch.uint8))
        for tensor in same:
            tensor.data = place.view(tensor.dtype).view(tensor.shape)
    return sum(place.numel() for place in places)


def read_whole(
    graphs: Iterable[tuple[Mapping[str, torch.Tensor], Collection[str]]],
) -> list[torch.Tensor]:
    """The weights of graphs, each given with the names of those that it only takes rows of, without those that all
    graphs take rows of."""
    read = [weight for weights, rows in graphs for name, weight in weights.items() if name not in rows]
    return list({id(weight): weight for weight in read}.values())


def new_memory(sizes: Sequence[int]) -> tuple[list[torch.Tensor], bool]:
    """For each size that many bytes (uint8), in one piece of memory; and is it in huge pages?

    No memory at all, ([], False), where it would be more than half of what is available.
    """
    ends = _ends(sizes)
    if not ends or ends[-1] > MOST_SHARE * _available_bytes():
        return [], False
    memory = untouched_zeros(ends[-1])
    return _places(memory, sizes, ends), advise_huge_pages(memory)


def has_room(tensors: Iterable[torch.Tensor], share: float) -> bool:
    """Would a copy of all of them take at most that share of the memory that is available?"""
    return sum(t.numel() * t.element_size() for t in tensors) <= share * _available_bytes()


def _ends(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(size + -size % ALIGNMENT for size in sizes))


def _places(memory: torch.Tensor, sizes: Sequence[int], ends: Sequence[int]) -> list[torch.Tensor]:
    return [memory[begin : begin + size] for begin, size in zip([0, *ends], sizes, strict=False)]


def _available_bytes() -> int:
    """Memory that can be had without swapping; 0 where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
