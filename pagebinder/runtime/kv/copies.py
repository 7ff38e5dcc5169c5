"""Copies that the engine runs before a step's graph, recorded while the step is scheduled.

    1. to host     blocks of requests that are swapped out
    2. to device   blocks of requests that come back
    3. on device   copy on write: whole blocks, in order (a source may be the destination of a copy before it)
    4. the graph

In this order a block may be handed on within one schedule: it is saved before anybody else writes it.

A step may fail before it takes its copies, so they may stay pending for long. All that time:

    destination    is referenced. With its last reference the copy into it is forgotten, before the block can be
                   handed out again, and so is what it was found under: those contents never come
    source         is pinned by the fence, until the step that copies it has finished or the copy is forgotten
    host slot      of a copy to the device: likewise, by the swapper. What is copied to the host needs no guard
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagebinder.runtime.kv.blocks import BlockPool, require


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole block `src` over the block `dst`."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class SwapCopy:
    """Copy a block to (`to_host`) or from a host slot."""

    block: int
    slot: int
    to_host: bool


class PendingCopies:
    """What was recorded and not yet taken, by destination block, which is one that was just handed out."""

    def __init__(self) -> None:
        self._copies: dict[int, BlockCopy] = {}
        self._to_host: list[SwapCopy] = []
        self._to_device: dict[int, SwapCopy] = {}

    def copy(self, src: int, dst: int) -> None:
        self._copies[dst] = BlockCopy(src, dst)

    def to_host(self, block: int, slot: int) -> None:
        """Save a block. One that is still to be copied is saved from where its contents lie now."""
        while block in self._copies:
            block = self._copies[block].src
        self._to_host.append(SwapCopy(block, slot, True))

    def to_device(self, block: int, slot: int) -> None:
        self._to_device[block] = SwapCopy(block, slot, False)

    def awaits_host(self, block: int) -> bool:
        """Whether a block's contents are still to come from a host slot, directly or by a copy."""
        while block in self._copies:
            block = self._copies[block].src
        return block in self._to_device

    def __len__(self) -> int:
        """Copies into blocks that are still to be taken."""
        return len(self._copies) + len(self._to_device)

    def are_pending(self, blocks: Iterable[int]) -> bool:
        """Whether a copy into any of these blocks was recorded and not yet taken."""
        return any(block in self._copies or block in self._to_device for block in blocks)

    def forget(self, block: int) -> bool:
        """Do not copy into this block; False if nobody was going to."""
        pending = self._copies if block in self._copies else self._to_device
        return pending.pop(block, None) is not None

    @property
    def blocks_to_save(self) -> set[int]:
        """Blocks that are still to be copied to the host; they may be free already."""
        return {swap.block for swap in self._to_host}

    @property
    def slots_to_read(self) -> set[int]:
        """Host slots of the copies to the device."""
        return {swap.slot for swap in self._to_device.values()}

    @property
    def sources(self) -> dict[int, int]:
        """Destination -> source of the copies on the device."""
        return {copy.dst: copy.src for copy in self._copies.values()}

    @property
    def awaited(self) -> set[int]:
        """Blocks whose contents are still to come."""
        return self._copies.keys() | self._to_device.keys()

    def take_copies(self) -> list[BlockCopy]:
        taken, self._copies = list(self._copies.values()), {}
        return taken

    def take_swaps(self) -> list[SwapCopy]:
        taken = [*self._to_host, *self._to_device.values()]
        self._to_host, self._to_device = [], {}
        return taken

    def check_integrity(self, pool: BlockPool) -> None:
        """Raise KVCacheIntegrityError for copies into blocks that may be handed out, or in an impossible order."""
        free = sorted(block for block in self.awaited if pool.blocks[block].ref_cnt == 0)
        require(not free, f"copies into free blocks are pending: {free}")
        twice = sorted(self._copies.keys() & self._to_device.keys())
        require(not twice, f"blocks are filled from two sources: {twice}")
        later = set(self._copies)
        for copy in self._copies.values():
            later.remove(copy.dst)
            require(copy.src not in later, f"block {copy.src} is copied before it is filled")
