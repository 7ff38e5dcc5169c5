"""What all managers share: the block tables of a group's requests, and how they start, grow, part and end.

    full attention      table  [ 7 ][ 3 ][ 9 ][12 ]            every block stays until the request ends
    sliding window      table  [ 0 ][ 0 ][ 9 ][12 ]            0 = null block: behind the window, given back
                                          ^ first_live

Logical block i always covers tokens [i * B, (i + 1) * B), so slots can be computed from the table alone. Work per
call is linear in the blocks that are added or given back, never in the length of the table, except when a request
starts, forks or ends.

    copy on write       a block that the next token is written into has one user. If it has more (after a fork), or
                        holds more of another text (partial hit), the request continues in a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pagebinder.runtime.kv.block_table import BlockTable
from pagebinder.runtime.kv.blocks import KVCacheBlock, require
from pagebinder.runtime.kv.context import CacheContext, GroupHit, GroupPrefix
from pagebinder.runtime.kv.retention import NEVER, NO_BOUNDARIES
from pagebinder.runtime.kv.specs import KVCacheSpec, cdiv
from pagebinder.runtime.request import Request


class SingleTypeManager:
    """Base: what attention over blocks of tokens needs; other kinds replace what differs."""

    # Whether every prefix of a hit is a hit too, so that a hit can be cut without another search.
    hits_are_prefix_closed: ClassVar[bool] = False
    # Whether new tokens may need more blocks, whether blocks are given back while a request runs, and whether blocks
    # beyond the planned tokens may be put elsewhere.
    grows_with_tokens: ClassVar[bool] = True
    forgets: ClassVar[bool] = True
    replaces_ahead: ClassVar[bool] = False
    # Whether tokens that were computed can be computed again as others: what they wrote is written anew.
    takes_back: ClassVar[bool] = True

    def __init__(self, spec: KVCacheSpec, context: CacheContext, group_id: int) -> None:
        self.spec = spec
        self.context = context
        self.pool, self.fence = context.pool, context.fence
        self.group_id = group_id
        self.block_size = spec.block_size
        self.hashes_per_block = max(1, spec.block_size // context.hash_block_size)
        self.max_blocks = spec.max_blocks_per_request(
            context.max_model_len, context.max_in_flight_tokens, context.max_encoder_tokens
        )
        self.array = context.rows.add_array("int32", max(1, self.table_width()))
        self.tables: dict[str, BlockTable] = {}
        self.keeps_every_block = self._keeps_every_block()

    # Rules of the kind

    @staticmethod
    def granularity(spec: KVCacheSpec, hash_block_size: int) -> int | None:
        """A prefix can be resumed at multiples of so many tokens; None: never."""
        return hash_block_size

    def table_width(self) -> int:
        """Most entries of a request's table."""
        return cdiv(self.context.max_model_len, self.block_size)

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_length: int, group_ids: Sequence[int]
    ) -> GroupHit:
        """The longest cached prefix of at most `max_length` tokens that can be resumed in all `group_ids`.

        Its length is a multiple of the context's alignment.
        """
        raise NotImplementedError

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """See `KVCacheSpec.num_skipped_tokens`."""
        return self.spec.num_skipped_tokens(num_computed_tokens)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Length of a table that covers `num_tokens` tokens."""
        return cdiv(num_tokens, self.block_size)

    def max_admission_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Most blocks that a request of at most `num_tokens` tokens holds at any time."""
        return min(cdiv(num_tokens, self.block_size), self.max_blocks)

    def covered_tokens(self, request_id: str) -> int:
        """Leading tokens that may be written without asking for more blocks."""
        return len(self.tables[request_id].blocks) * self.block_size

    # Starting

    def num_blocks_to_start(
        self, request: Request, prefix: GroupPrefix, num_tokens: int, *, capped: bool = False
    ) -> int:
        """Blocks that leave the free queue if a request starts from `prefix` and is to hold `num_tokens` tokens.

        That includes hit blocks which are free now. `capped`: judge by what the request holds at any one time
        instead of by the table's length (for the admission of a whole prompt).
        """
        skipped = self._num_skipped_blocks(prefix.num_tokens, len(prefix.blocks))
        live = prefix.blocks[skipped:]
        required = len(live) + self._num_new_blocks(
            request.request_id, prefix.num_tokens, num_tokens, len(live)
        )
        if capped:
            required = min(
                self.num_blocks_for(num_tokens) - skipped,
                self.max_admission_blocks(num_tokens, request.num_encoder_tokens),
            )
        evictable = sum(block.ref_cnt == 0 and not block.is_null for block in live)
        return max(required - len(live), 0) + evictable

    def num_blocks_to_copy(self, prefix: GroupPrefix) -> int:
        """Free blocks that `start` takes besides, for one step, if it may copy the tail instead of taking it."""
        tail = prefix.tail
        return int(tail is not None and tail.ref_cnt == 0 and not self._ends_with(prefix))

    def start(self, request_id: str, prefix: GroupPrefix, may_copy: bool = True) -> None:
        """First phase: open a table with the prefix hit, referenced where it is needed, null before.

        A tail that nobody uses and that holds no more than the hit is simply continued. Otherwise its copy is,
        unless there is no room for one: then the request takes the tail itself and what else it held is lost.
        """
        assert request_id not in self.tables, f"{request_id!r} already has a block table"
        skipped = self._num_skipped_blocks(prefix.num_tokens, len(prefix.blocks))
        table = self.tables[request_id] = BlockTable(request_id, self.context.rows, self.array)
        table.extend(prefix.blocks)
        table.drop_before(skipped, self.pool.null_block)
        table.num_hashed = len(prefix.blocks)
        tail = prefix.tail
        self.pool.touch(table.live_blocks if tail is None else [*table.live_blocks, tail])
        if tail is None:
            if prefix.num_tokens % self.block_size:
                table.begins_inside = len(prefix.blocks)
            return
        if tail.ref_cnt == 1 and (self._ends_with(prefix) or not may_copy):
            if not self._ends_with(prefix):
                self.pool.evict_blocks([tail.block_id])
            table.extend([tail])
        else:
            table.copy_from = tail

    # Growing

    def num_blocks_to_grow(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> int:
        """Blocks that leave the free queue if a request is to compute tokens up to `num_tokens`."""
        table = self.tables[request_id]
        return self._num_new_blocks(
            request_id, num_computed_tokens, num_tokens, len(table.blocks) - table.first_live
        ) + self._must_copy(table, num_computed_tokens)

    def grow(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> None:
        """Second phase: make room for tokens [num_computed_tokens, num_tokens)."""
        table = self.tables[request_id]
        if self._must_copy(table, num_computed_tokens):
            self._replace_by_copy(table, self.num_blocks_for(num_computed_tokens) - 1)
        first = len(table.blocks)
        self._append(table, num_computed_tokens, num_tokens)
        if table.copy_from is not None:
            self._record_copy(table.copy_from, table.blocks[first])
            table.copy_from = None

    def count_appends(
        self, tables: Sequence[BlockTable], starts: Sequence[int], ends: Sequence[int]
    ) -> list[int] | None:
        """Blocks to append to each of several tables, so that tokens [start, end) have room; None if that is not all
        that some of them need. No table may need a copy."""
        size = self.block_size
        return [max(-(-end // size) - len(table.blocks), 0) for table, end in zip(tables, ends)]

    def note_appends(self, tables: Sequence[BlockTable], starts: Sequence[int]) -> list[int]:
        """Covered tokens of several tables that were appended to, for tokens from `start` on."""
        size = self.block_size
        return [len(table.blocks) * size for table in tables]

    def share(self, parent_id: str, child_id: str, num_computed_tokens: int) -> None:
        """Open the child's table with the blocks that hold the parent's first `num_computed_tokens` tokens."""
        parent = self.tables[parent_id]
        count = min(self.num_blocks_for(num_computed_tokens), len(parent.blocks))
        table = self.tables[child_id] = BlockTable(child_id, self.context.rows, self.array)
        table.extend(parent.blocks[:count])
        first_live = max(parent.first_live, self._num_skipped_blocks(num_computed_tokens, count))
        table.drop_before(first_live, self.pool.null_block)
        table.num_hashed = min(parent.num_hashed, count)
        table.begins_inside = parent.begins_inside
        self.pool.touch(table.live_blocks)

    def restore(
        self, request_id: str, length: int, begins_inside: int, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Open a table of `length` with new blocks at the logical places of a swap image, filled from its slots."""
        table = self.tables[request_id] = BlockTable(request_id, self.context.rows, self.array)
        table.extend([self.pool.null_block] * length)
        table.first_live = pairs[0][0] if pairs else length
        table.begins_inside = begins_inside
        for (index, slot), block in zip(pairs, self.pool.get_new_blocks(len(pairs))):
            table.put(index, block)
            self.context.copies.to_device(block.block_id, slot)

    # Prefix cache

    def cache_blocks(self, request: Request, num_tokens: int) -> int:
        """Make the retained blocks that lie wholly in the first `num_tokens` (computed) tokens reusable. Returns
        what `next_cache_at` says then."""
        table = self.tables[request.request_id]
        end = num_tokens // self.block_size
        start = max(table.num_hashed, table.first_live)
        if end > start:
            mask = None if self.keeps_every_block else self._retained(table, start, end)
            self._store(table, request.block_hashes, start, end, mask)
        if end > table.num_hashed:
            table.num_hashed = end
        return (
            (table.num_hashed + 1) * self.block_size if self.keeps_every_block else self._next_cache_at(table)
        )

    def cache_end(self, request: Request, num_tokens: int) -> None:
        """Make what a resume at `num_tokens` (computed) tokens needs reusable, retained or not: a request ends."""
        table, hashes = self.tables[request.request_id], request.block_hashes
        skipped = self.get_num_skipped_tokens(num_tokens)
        if skipped >= num_tokens or skipped // self.block_size < table.first_live:
            return  # nothing is needed, or some of it was given back already
        end, per_block = num_tokens // self.block_size, self.hashes_per_block
        start = table.num_hashed if self.hits_are_prefix_closed else skipped // self.block_size
        self._store(table, hashes, start, end, None)
        if num_tokens % self.block_size and end != table.begins_inside:
            units = hashes[end * per_block : num_tokens // self.context.hash_block_size]
            parent = hashes[end * per_block - 1] if end else None
            self.pool.cache_partial_block(table.blocks[end], units, self.group_id, parent)

    def next_cache_at(self, request_id: str) -> int:
        """Computed tokens at which `cache_blocks` has something to store; NEVER if it will not."""
        return self._next_cache_at(self.tables[request_id])

    def _next_cache_at(self, table: BlockTable) -> int:
        index = table.num_hashed
        if self.keeps_every_block:
            return (index + 1) * self.block_size
        boundary = self.context.boundaries[table.request_id].next_after(index * self.block_size)
        if boundary == NEVER:
            return NEVER
        first_needed = self.get_num_skipped_tokens(boundary) // self.block_size
        return (max(index, first_needed) + 1) * self.block_size

    # Giving back

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back the blocks that lie wholly behind what position `num_computed_tokens` can see."""
        table = self.tables[request_id]
        end = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        if end > table.first_live and (end := min(end, len(table.blocks))) > table.first_live:
            self.fence.free(reversed(table.drop_before(end, self.pool.null_block)))

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, last first: the tail of a prefix is evicted before its head."""
        table = self.tables.pop(request_id, None)
        if table is not None:
            self.fence.free(reversed(table.live_blocks))

    def overwrites_state_at(self, num_computed_tokens: int) -> bool:
        """Whether a step that starts behind so many tokens replaces state that it reads: it cannot be repeated."""
        return self.state_block(num_computed_tokens) is not None

    def state_block(self, num_computed_tokens: int) -> int | None:
        """The logical block whose state a step behind so many tokens reads and replaces; None: it replaces none."""
        return None

    def keep_state(self, request_id: str, index: int) -> KVCacheBlock:
        """Let the next step write a copy of a logical block instead; returns the block as it was, which lives until
        that step has finished."""
        table = self.tables[request_id]
        kept = table.blocks[index]
        self._replace_by_copy(table, index)
        return kept

    def take_back(self, request_id: str, index: int, kept: KVCacheBlock) -> None:
        """Undo `keep_state`, before the step is said to have finished: the state is what it was before."""
        table = self.tables[request_id]
        written = table.blocks[index]
        self.pool.touch([kept])
        table.put(index, kept)
        self.fence.free([written])

    def block_ids(self, request_id: str):
        """The live view of a request's block ids (0 = null), int32. It changes as the request is scheduled."""
        return self.tables[request_id].ids

    def check_integrity(self) -> None:
        """Raise KVCacheIntegrityError if a table differs from its row or has nulls in the wrong place."""
        for request_id, table in self.tables.items():
            ids = [block.block_id for block in table.blocks]
            require(ids == table.ids.tolist(), f"the row of {request_id!r} differs from its blocks")
            require(not table.row[len(ids) :].any(), f"the row of {request_id!r} goes on behind its blocks")
            require(not any(ids[: table.first_live]), f"{request_id!r} keeps blocks behind its window")
            require(self._live_part_is_sound(table), f"{request_id!r} has a null block in its live part")
            require(table.copy_from is None, f"{request_id!r} lacks the copy of its partial hit")

    # Inside

    def _num_skipped_blocks(self, num_computed_tokens: int, held: int) -> int:
        return min(self.get_num_skipped_tokens(num_computed_tokens) // self.block_size, held)

    def _num_new_blocks(self, request_id: str, start: int, end: int, num_live: int) -> int:
        """Blocks to append for tokens [start, end) to a table with `num_live` live blocks (from `start` on if
        the table is not open yet)."""
        table = self.tables.get(request_id)
        held = len(table.blocks) if table is not None else start // self.block_size
        return max(cdiv(end, self.block_size) - held, 0)

    def _append(self, table: BlockTable, start: int, end: int) -> None:
        missing = cdiv(end, self.block_size) - len(table.blocks)
        if missing > 0:
            table.extend(self.pool.get_new_blocks(missing))

    def _must_copy(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """Whether the next token is written into a block that others use, too."""
        index = num_computed_tokens // self.block_size
        return (
            num_computed_tokens % self.block_size > 0
            and index < len(table.blocks)
            and self.fence.is_shared(table.blocks[index])
        )

    def _replace_by_copy(self, table: BlockTable, index: int) -> None:
        (new,) = self.pool.get_new_blocks(1)
        old = table.blocks[index]
        table.put(index, new)
        self._record_copy(old, new)

    def _record_copy(self, source: KVCacheBlock, new: KVCacheBlock) -> None:
        """Continue in `new`, a copy of `source`, whose reference goes back when the copy was made."""
        self.context.copies.copy(source.block_id, new.block_id)
        self.fence.free_source(source, new)

    def _ends_with(self, prefix: GroupPrefix) -> bool:
        """Whether the tail holds nothing reusable behind the hit."""
        num_units = prefix.num_tokens % self.block_size // self.context.hash_block_size
        return len(prefix.tail.inner_hashes or ()) + 1 == num_units

    def _retained(self, table: BlockTable, start: int, end: int) -> list[bool]:
        """Which of the blocks [start, end) a resume at a retained boundary needs."""
        boundaries = self.context.boundaries.get(table.request_id, NO_BOUNDARIES)
        size = self.block_size
        return [
            (boundary := boundaries.next_after(i * size)) != NEVER
            and self.get_num_skipped_tokens(boundary) // size <= i
            for i in range(start, end)
        ]

    def _keeps_every_block(self) -> bool:
        """Whether every full block is retained, whatever the request."""
        return False

    def _store(
        self, table: BlockTable, hashes: Sequence[bytes], start: int, end: int, mask: list[bool] | None
    ) -> None:
        if start <= table.begins_inside < end:
            mask = mask or [True] * (end - start)
            mask[table.begins_inside - start] = False
        self.pool.cache_full_blocks(
            table.blocks, hashes, start, end, self.group_id, self.hashes_per_block, mask
        )

    def _live_part_is_sound(self, table: BlockTable) -> bool:
        return all(not block.is_null for block in table.live_blocks)
