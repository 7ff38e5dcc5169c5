"""What torch's allocator takes from a GPU for blocks that come and go: segments, which it cuts and keeps.

    a block of             comes from segments of
    up to 1 MiB            2 MiB
    less than 10 MiB       20 MiB
    more                   its own size, up to a multiple of 2 MiB

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings: the smallest free block that is
large enough is taken, and cut if enough is left; neighbours that are free become one again.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_BYTES = 512
SMALL_BYTES, SMALL_SEGMENT_BYTES = 1 << 20, 2 << 20
MIN_OWN_BYTES, SEGMENT_BYTES, OWN_GRAIN_BYTES = 10 << 20, 20 << 20, 2 << 20


@dataclass(eq=False)
class Block:
    """Part of a segment, between its neighbours."""

    num_bytes: int
    is_small: bool
    is_free: bool = True
    before: Block | None = None
    behind: Block | None = None


class SegmentPool:
    """A pool of one stream. `num_bytes`: of all its segments."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._free: list[Block] = []

    def take(self, num_bytes: int) -> Block:
        """A block of so many bytes; 0 bytes are a block, too, but take no memory."""
        size = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        if size == 0:
            return Block(0, is_small=True, is_free=False)
        is_small = size <= SMALL_BYTES
        fitting = [b for b in self._free if b.is_small == is_small and b.num_bytes >= size]
        block = min(fitting, key=lambda b: b.num_bytes) if fitting else self._segment(size, is_small)
        if block in self._free:
            self._free.remove(block)
        block.is_free = False
        left = block.num_bytes - size
        if left >= BLOCK_BYTES if is_small else left > SMALL_BYTES:
            self._cut(block, size)
        return block

    def give_back(self, block: Block) -> None:
        if block.num_bytes == 0:
            return
        block.is_free = True
        for other in (block.before, block.behind):
            if other is not None and other.is_free:
                self._free.remove(other)
                block = _joined(other, block) if other is block.before else _joined(block, other)
        self._free.append(block)

    def _segment(self, size: int, is_small: bool) -> Block:
        own = -(-size // OWN_GRAIN_BYTES) * OWN_GRAIN_BYTES
        num_bytes = SMALL_SEGMENT_BYTES if is_small else SEGMENT_BYTES if size < MIN_OWN_BYTES else own
        self.num_bytes += num_bytes
        return Block(num_bytes, is_small)

    def _cut(self, block: Block, size: int) -> None:
        rest = Block(block.num_bytes - size, block.is_small, before=block, behind=block.behind)
        if rest.behind is not None:
            rest.behind.before = rest
        block.num_bytes, block.behind = size, rest
        self._free.append(rest)


def _joined(first: Block, second: Block) -> Block:
    first.num_bytes += second.num_bytes
    first.behind = second.behind
    if second.behind is not None:
        second.behind.before = first
    return first
