"""The memory behind all KV caches: one allocation, seen by every layer through its own strided view.

    block 0 (null)       block 1              block 2
    |p0|p1|p2|p3|pad|    |p0|p1|p2|p3|pad|    |p0|p1|p2|p3|pad|     p_i: page of the layer in slot i of the group
     <---- bytes_per_block ---->

    view of a layer's tensor [N, *shape]: offset = its page's offset, stride over N = bytes_per_block

A layer whose state is several tensors has them one after the other in its page. A block belongs to one group at a
time, so layers of different groups alias the same bytes in different blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from pagebinder.custom_ops.cpu.huge_pages import advise_huge_pages, make_pages, untouched_zeros
from pagebinder.custom_ops.layer_state import CacheTensor, LayerState
from pagebinder.errors import CacheCapacityError
from pagebinder.runtime.kv import KVPlan
from pagebinder.runtime.kv.copies import BlockCopy, SwapCopy

# Copied to measure the rate of swapping.
TIMED_BYTES = 16 << 20
# A moment: seconds of the host, or an event of the GPU's stream.
Mark = float | torch.cuda.Event
# Host slots lie in pieces of this size, as pinned memory comes in powers of two.
HOST_BYTES = 256 << 20


def _zeros_to_come(num_bytes: int, idle: threading.Event) -> torch.Tensor:
    """Zeros [num_bytes] uint8 on the CPU in huge pages. These are made from now on, the first ones first, while
    `idle`: not all in the steps of the first requests, and not beside them."""
    memory = untouched_zeros(num_bytes)
    advise_huge_pages(memory)
    if make_pages(memory, idle) is None:
        memory.zero_()
    return memory


def _copy_block(destination: torch.Tensor, source: torch.Tensor) -> None:
    if destination.is_cuda or source.is_cuda:
        destination.copy_(source, non_blocking=True)
    else:  # in this thread: torch's would wait for one another with each block, 20 ms where a core is busy
        np.copyto(destination.numpy(), source.numpy())


class KVArena:
    """`num_blocks` blocks on one device. `caches` maps "kv_cache_<layer number><suffix>" to the view of that
    tensor of the layer."""

    def __init__(
        self, plan: KVPlan, states: Sequence[LayerState], num_blocks: int, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block = plan.bytes_per_block
        num_bytes = num_blocks * plan.bytes_per_block
        self.idle = threading.Event()  # set while nobody computes
        self.idle.set()
        try:
            if device.type == "cpu":
                self.memory = _zeros_to_come(num_bytes, self.idle)
            else:
                self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:
            raise CacheCapacityError(
                f"The KV cache of {num_blocks:,} blocks ({num_bytes / 2**30:,.1f} GiB) cannot be allocated on "
                f"{device}; give fewer kv_cache_bytes or num_kv_blocks."
            ) from error
        self.num_host_slots, self._slots_each = 0, 1
        self._host: list[torch.Tensor] = []  # [<= slots_each, bytes_per_block] each
        # Bytes, begin and end of those that nobody has asked for.
        self._swaps: list[tuple[int, Mark, Mark]] = []
        self.caches: dict[str, torch.Tensor] = {}
        for state, page in zip(states, plan.layers, strict=True):
            offset = page.offset_bytes
            for tensor in state.tensors(plan.groups[page.group].block_size):
                self.caches[f"kv_cache_{state.index}{tensor.suffix}"] = self._view(tensor, offset)
                offset += tensor.num_bytes

    def _view(self, tensor: CacheTensor, offset_bytes: int) -> torch.Tensor:
        dtype = getattr(torch, tensor.dtype)
        strides = torch.empty(tensor.shape, device="meta").stride()
        return self.memory.view(dtype).as_strided(
            (self.num_blocks, *tensor.shape),
            (self.bytes_per_block // dtype.itemsize, *strides),
            offset_bytes // dtype.itemsize,
        )

    def add_host_blocks(self, num_slots: int) -> None:
        """Host memory for blocks of preempted requests (pinned when the arena is on a GPU).

        Raises CacheCapacityError if it cannot be allocated.
        """
        each = self._slots_each = max(1, HOST_BYTES // self.bytes_per_block)
        num_bytes = num_slots * self.bytes_per_block
        try:
            if self.memory.is_cuda:
                # What nobody can have fails here, before parts of it are taken.
                torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                sizes = [min(each, num_slots - first) for first in range(0, num_slots, each)]
                self._host = [
                    torch.zeros((n, self.bytes_per_block), dtype=torch.uint8, pin_memory=True, device="cpu")
                    for n in sizes
                ]
            else:
                memory = _zeros_to_come(num_bytes, self.idle)
                self._host = list(memory.view(num_slots, self.bytes_per_block).split(each))
            self.num_host_slots = num_slots
        # OverflowError and TypeError: that is no size of a tensor.
        except (RuntimeError, MemoryError, OSError, OverflowError, TypeError) as error:
            raise CacheCapacityError(
                f"Swap space of {num_bytes / 2**30:,.1f} GiB cannot be allocated; give less swap_bytes."
            ) from error

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, one after the other: a source may be the destination of a copy before it."""
        blocks = self.memory.view(self.num_blocks, self.bytes_per_block)
        for copy in copies:
            _copy_block(blocks[copy.dst], blocks[copy.src])

    def swap_blocks(self, copies: Sequence[SwapCopy]) -> None:
        """Copy whole blocks to or from host slots, one after the other. A GPU's are not waited for: the slots are
        read and written by its stream alone."""
        blocks = self.memory.view(self.num_blocks, self.bytes_per_block)
        begin = self._mark()
        for copy in copies:
            part, row = divmod(copy.slot, self._slots_each)
            block, slot = blocks[copy.block], self._host[part][row]
            _copy_block(*((slot, block) if copy.to_host else (block, slot)))
        self._swaps.append((len(copies) * self.bytes_per_block, begin, self._mark()))

    def take_swap_times(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of swaps that are done and were not taken before. On a GPU it is the time of its copies,
        without the step that they waited for."""
        if not self.memory.is_cuda:
            done = [(num_bytes, end - begin) for num_bytes, begin, end in self._swaps]
            self._swaps.clear()
            return done
        done = []
        while self._swaps and self._swaps[0][2].query():
            num_bytes, begin, end = self._swaps.pop(0)
            done.append((num_bytes, begin.elapsed_time(end) / 1e3))
        return done

    def _mark(self) -> Mark:
        if not self.memory.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.memory.device))
        return event

    def time_copies(self) -> tuple[int, float]:
        """Copy some blocks to host slots and back; returns (bytes, seconds). Contents stay the same."""
        count = min(self.num_blocks, self.num_host_slots, max(1, TIMED_BYTES // self.bytes_per_block))
        there = [SwapCopy(i, i, True) for i in range(count)]
        back = [SwapCopy(i, i, False) for i in range(count)]
        for _ in range(2):  # the first touches the memory for the first time
            self.swap_blocks(there + back)
        if self.memory.is_cuda:
            torch.cuda.synchronize(self.memory.device)
        return self.take_swap_times()[-1]

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()
