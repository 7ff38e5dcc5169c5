"""Copies that the engine runs before a step's graph, recorded while the step is scheduled.

    1. to host     blocks of requests that are swapped out
    2. to device   blocks of requests that come back
    3. on device   copy on write: whole blocks, in order (a source may be the destination of a copy before it)
    4. the graph

In this order a block may be handed on within one schedule: it is saved before anybody else writes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagebinder.runtime.kv.blocks import BlockPool


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
    """What was recorded and not yet taken, by destination block."""

    def __init__(self) -> None:
        self._copies: dict[int, BlockCopy] = {}
        self._to_host: list[SwapCopy] = []
        self._to_device: dict[int, SwapCopy] = {}

    def copy(self, src: int, dst: int) -> None:
        self._copies.pop(dst, None)
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

    def drop_unused(self, pool: BlockPool) -> set[int]:
        """Forget copies into blocks that nobody holds any more: a later owner's contents would be overwritten.

        Returns those blocks.
        """
        dropped: set[int] = set()
        for pending in (self._copies, self._to_device):
            unused = [i for i in pending if pool.blocks[i].ref_cnt == 0]
            for block in unused:
                del pending[block]
            dropped.update(unused)
        return dropped

    def take_copies(self) -> list[BlockCopy]:
        taken, self._copies = list(self._copies.values()), {}
        return taken

    def take_swaps(self) -> list[SwapCopy]:
        taken = [*self._to_host, *self._to_device.values()]
        self._to_host, self._to_device = [], {}
        return taken
