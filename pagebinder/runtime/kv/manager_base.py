"""What all managers share: the block tables of a group's requests, and how they grow and shrink.

    full attention      table  [ 7 ][ 3 ][ 9 ][12 ]            every block stays until the request ends
    sliding window      table  [ 0 ][ 0 ][ 9 ][12 ]            0 = null block: behind the window, given back
                                          ^ first_live

A table is append-only apart from entries becoming null, so logical block i always covers tokens
[i * B, (i + 1) * B) and slots can be computed from the table alone. Work per call is linear in the blocks
that are added or given back, never in the length of the table, except when a request starts or ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from pagebinder.runtime.kv.blocks import BlockPool, KVCacheBlock, require
from pagebinder.runtime.kv.specs import KVCacheSpec, cdiv

HitBlocks = list[list[KVCacheBlock]]


class BlockTable:
    """A request's blocks in one group. `ids` mirrors `blocks` and is what step plans read, live."""

    __slots__ = ("blocks", "first_live", "ids", "num_hashed")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.ids: list[int] = []
        # Blocks before `first_live` are null; blocks before `num_hashed` were offered to the prefix cache.
        self.first_live = 0
        self.num_hashed = 0

    def extend(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.blocks.extend(blocks)
        self.ids.extend(block.block_id for block in self.blocks[len(self.ids) :])

    @property
    def live_blocks(self) -> list[KVCacheBlock]:
        return self.blocks[self.first_live :]


class SingleTypeManager:
    """Base: allocation, caching and freeing that all kinds share.

    `hash_block_size` (tokens) is what request hashes are computed at; it divides the group's block size.
    `max_blocks` caps what one request can hold in this group at any time.
    """

    # Whether every prefix of a hit is a hit too, so that a hit can be cut without another search.
    hits_are_prefix_closed: ClassVar[bool] = False

    def __init__(
        self, spec: KVCacheSpec, pool: BlockPool, group_id: int, *, hash_block_size: int, max_blocks: int
    ) -> None:
        assert spec.block_size % hash_block_size == 0, "hashes must divide blocks"
        self.spec = spec
        self.pool = pool
        self.group_id = group_id
        self.block_size = spec.block_size
        self.hashes_per_block = spec.block_size // hash_block_size
        self.max_blocks = max_blocks
        self.tables: dict[str, BlockTable] = {}

    # Rules of the kind

    def find_longest_cache_hit(
        self, hashes: Sequence[bytes], max_length: int, alignment: int, group_ids: Sequence[int]
    ) -> HitBlocks:
        """Cached blocks of the longest usable prefix of at most `max_length` tokens, one list per group.

        The hit ends at a multiple of `alignment` tokens; its length is len(list) * block_size. Blocks that
        the prefix does not need are null. All `group_ids` must have a block for it to count.
        """
        raise NotImplementedError

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no query from position `num_computed_tokens` on can see."""
        raise NotImplementedError

    # Allocation

    def max_admission_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request of at most `num_tokens` tokens holds at any time."""
        return min(cdiv(num_tokens, self.block_size), self.max_blocks)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, hit: Sequence[KVCacheBlock], num_hit_tokens: int,
        *, capped: bool = False,
    ) -> int:  # fmt: skip
        """Blocks that leave the free queue if the request is to hold `num_tokens` tokens.

        For a new request that includes hit blocks which are free now. `capped`: judge by what the request
        holds at any one time instead of by the table's length (for the admission of a whole prompt).
        """
        required = cdiv(num_tokens, self.block_size)
        table = self.tables.get(request_id)
        if table is not None:
            return max(required - len(table.blocks), 0)
        skipped = self._num_skipped_blocks(num_hit_tokens, len(hit))
        live_hit = hit[skipped:]
        live_required = required - skipped
        if capped:
            live_required = min(live_required, self.max_admission_blocks(num_tokens))
        evictable = sum(block.ref_cnt == 0 and not block.is_null for block in live_hit)
        return max(live_required - len(live_hit), 0) + evictable

    def allocate_new_computed_blocks(
        self, request_id: str, hit: Sequence[KVCacheBlock], num_hit_tokens: int
    ) -> None:
        """Start a request's table with its prefix hit: referenced where it is needed, null before."""
        assert request_id not in self.tables, f"{request_id!r} already has a block table"
        skipped = self._num_skipped_blocks(num_hit_tokens, len(hit))
        self.pool.touch(hit[skipped:])
        table = self.tables[request_id] = BlockTable()
        table.extend([self.pool.null_block] * skipped)
        table.extend(hit[skipped:])
        table.first_live, table.num_hashed = skipped, len(hit)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Append blocks until the table covers `num_tokens` tokens; returns the new ones."""
        table = self.tables.get(request_id)
        if table is None:
            table = self.tables[request_id] = BlockTable()
        missing = cdiv(num_tokens, self.block_size) - len(table.blocks)
        if missing <= 0:
            return []
        new = self.pool.get_new_blocks(missing)
        table.extend(new)
        return new

    def cache_blocks(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Make the blocks that lie wholly in the first `num_tokens` (computed) tokens reusable."""
        table = self.tables[request_id]
        num_full = num_tokens // self.block_size
        start = max(table.num_hashed, table.first_live)
        if num_full <= start:
            return
        self.pool.cache_full_blocks(
            table.blocks, hashes, start, num_full, self.group_id, hashes_per_block=self.hashes_per_block
        )
        table.num_hashed = num_full

    # Giving back

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back the blocks that lie wholly behind what position `num_computed_tokens` can see."""
        table = self.tables.get(request_id)
        if table is None:
            return
        end = self._num_skipped_blocks(num_computed_tokens, len(table.blocks))
        if end <= table.first_live:
            return
        behind = table.blocks[table.first_live : end]
        for i in range(table.first_live, end):
            table.blocks[i] = self.pool.null_block
            table.ids[i] = 0
        table.first_live = end
        self.pool.free_blocks(reversed(behind))

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, last first: the tail of a prefix is evicted before its head."""
        table = self.tables.pop(request_id, None)
        if table is not None:
            self.pool.free_blocks(reversed(table.live_blocks))

    def block_ids(self, request_id: str) -> list[int]:
        """The live list of a request's block ids (0 = null). It changes as the request is scheduled."""
        return self.tables[request_id].ids

    def check_integrity(self) -> None:
        """Raise KVCacheIntegrityError if a table differs from its mirror or has nulls in the wrong place."""
        for request_id, table in self.tables.items():
            ids = [block.block_id for block in table.blocks]
            require(ids == table.ids, f"block ids of {request_id!r} differ from its blocks")
            require(not any(ids[: table.first_live]), f"{request_id!r} keeps blocks behind its window")
            require(all(ids[table.first_live :]), f"{request_id!r} has a null block in its live part")

    def _num_skipped_blocks(self, num_computed_tokens: int, held: int) -> int:
        return min(self.get_num_skipped_tokens(num_computed_tokens) // self.block_size, held)
