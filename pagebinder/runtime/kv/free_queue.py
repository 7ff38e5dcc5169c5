"""A block's bookkeeping record, and the queue of the blocks that nobody uses.

    evict first                                                   evict last
    head <-> [un-hashed, last freed first] <-> [never used] <-> [hashed, least recently used first] <-> tail

The links live in the blocks themselves, so a prefix hit takes a block out of the middle in O(1) and no step
allocates list nodes. `head` and `tail` are sentinels that are never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagebinder.collector import collector_paused


class KVCacheBlock:
    """One physical block: who uses it, what prefix it holds, and its links while it is free.

    `block_hash` is the chain hash of the longest prefix whose end the block holds, for the layers of `group_id`,
    while its contents can be hit, else None; `inner_hashes` are those of the units inside it that end before, first
    to last, or None. A block is in the free queue exactly when `next_free` is set. Equality is identity.
    """

    __slots__ = ("block_hash", "block_id", "group_id", "inner_hashes", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.group_id = -1
        self.inner_hashes: list[bytes] | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    @property
    def is_null(self) -> bool:
        """The null block pads block tables; it is never written, counted or freed."""
        return self.block_id == 0

    def __repr__(self) -> str:
        hashed = self.block_hash.hex()[:8] if self.block_hash else None
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, hash={hashed})"


def make_blocks(num_blocks: int) -> list[KVCacheBlock]:
    """Create blocks 0..num_blocks-1.

    The cyclic collector would rescan the growing list over and over (three quarters of the time for 10^6
    blocks), so it is paused meanwhile.
    """
    with collector_paused():
        return list(map(KVCacheBlock, range(num_blocks)))


class FreeBlockQueue:
    """Intrusive doubly linked list of free blocks; every operation is O(1) per block moved."""

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-2)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_free_blocks = 0
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the front block. Raises ValueError when the queue is empty."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first `n` blocks, front first. Raises ValueError when there are fewer."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks wanted, but only {self.num_free_blocks} are free")
        taken: list[KVCacheBlock] = []
        block = self._head.next_free
        for _ in range(n):
            following = block.next_free
            block.prev_free = block.next_free = None
            taken.append(block)
            block = following
        self._head.next_free = block
        block.prev_free = self._head
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Unlink one block wherever it is. Raises RuntimeError when it is not in the queue."""
        if block.prev_free is None or block.next_free is None:
            raise RuntimeError(f"{block!r} is not in the free queue")
        block.prev_free.next_free = block.next_free
        block.next_free.prev_free = block.prev_free
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the back: it is handed out last."""
        self._insert_before(self._tail, (block,))

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the back, in the given order."""
        self._insert_before(self._tail, blocks)

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the front; the first given is the next one handed out."""
        self._insert_before(self._head.next_free, blocks)

    def _insert_before(self, successor: KVCacheBlock, blocks: Iterable[KVCacheBlock]) -> None:
        last, count = successor.prev_free, 0
        for block in blocks:
            assert block.next_free is None, f"{block!r} is already in the free queue"
            block.prev_free = last
            last.next_free = block
            # Also marks the block as linked, so that the same block twice in `blocks` is caught.
            block.next_free = successor
            last = block
            count += 1
        successor.prev_free = last
        self.num_free_blocks += count

    def get_all_free_blocks(self) -> Sequence[KVCacheBlock]:
        """Every free block, front first. O(free blocks): for tests and integrity checks."""
        blocks: list[KVCacheBlock] = []
        block = self._head.next_free
        while block is not self._tail:
            blocks.append(block)
            block = block.next_free
        return blocks
