"""Recurrent state and short convolutions: one state a block, checkpoints where somebody wants to resume.

    tokens   0       B       2B      3B      4B  e          chunk [0, e), boundary 2B is retained
    table    [ null ][  3   ][ null ][ null ][ 5 ]          block i: state after the last computed token of
                        |                      |            [i * B, (i + 1) * B); null: nobody wants it
                   checkpoint of 2B     running state

The step that computes [s, e) starts from the block of token s - 1 and writes the block of token e - 1 and those in
between that are not null. At a boundary the next token belongs to the next block, so a checkpoint that is resumed
from, or shared after a fork, is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagebinder.runtime.kv.block_table import BlockTable
from pagebinder.runtime.kv.context import GroupHit
from pagebinder.runtime.kv.manager_base import SingleTypeManager
from pagebinder.runtime.kv.retention import NO_BOUNDARIES
from pagebinder.runtime.kv.specs import KVCacheSpec, RecurrentSpec, cdiv


class RecurrentManager(SingleTypeManager):
    """A resume at n tokens needs one block: the checkpoint of n, a multiple of the block size."""

    spec: RecurrentSpec
    replaces_ahead = True
    takes_back = False

    @staticmethod
    def granularity(spec: KVCacheSpec, hash_block_size: int) -> int:
        return spec.block_size

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_length: int, group_ids: Sequence[int]
    ) -> GroupHit:
        alignment, null = self.context.alignment, self.pool.null_block
        for length in range(max_length // alignment * alignment, 0, -alignment):
            found = self.pool.get_cached_block(hashes[length // self.context.hash_block_size - 1], group_ids)
            if found is not None:
                before = [null] * (length // self.block_size - 1)
                return GroupHit(length, [[*before, block] for block in found], [None] * len(group_ids))
        return GroupHit(0, [[] for _ in group_ids], [None] * len(group_ids))

    def max_admission_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """The block that is read, the one that is written, and the checkpoints of one step."""
        return min(cdiv(num_tokens, self.block_size), self.max_blocks, 2 + self._most_checkpoints())

    def covered_tokens(self, request_id: str) -> int:
        return self.tables[request_id].covered_tokens

    def grow(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> None:
        super().grow(request_id, num_computed_tokens, num_tokens)
        self._note_covered(self.tables[request_id], num_computed_tokens)

    def count_appends(
        self, tables: Sequence[BlockTable], starts: Sequence[int], ends: Sequence[int]
    ) -> list[int] | None:
        """Tokens of one block only: what is written is the running state, and at most its end is a boundary."""
        size, counts = self.block_size, []
        for table, start, end in zip(tables, starts, ends):
            last = (end - 1) // size
            missing = last + 1 - len(table.blocks)
            if start < last * size or not 0 <= missing <= 1 or (not missing and table.blocks[last].is_null):
                return None
            counts.append(missing)
        return counts

    def note_appends(self, tables: Sequence[BlockTable], starts: Sequence[int]) -> list[int]:
        for table, start in zip(tables, starts):
            self._note_covered(table, start)
        return [table.covered_tokens for table in tables]

    def _note_covered(self, table: BlockTable, num_computed_tokens: int) -> None:
        index = num_computed_tokens // self.block_size
        while index < len(table.blocks) and not table.blocks[index].is_null:
            index += 1
        table.covered_tokens = max(num_computed_tokens, index * self.block_size)

    def state_block(self, num_computed_tokens: int) -> int | None:
        index, inside = divmod(num_computed_tokens, self.block_size)
        return index if inside else None

    def _most_checkpoints(self) -> int:
        context = self.context
        if not self.context.can_resume:
            return 0
        return context.retention.most_checkpoints(context.alignment, context.max_in_flight_tokens)

    def _wanted(self, request_id: str, start: int, end: int) -> list[int]:
        """Logical blocks that the step [start, end) writes and that must not be null."""
        boundaries = self.context.boundaries.get(request_id, NO_BOUNDARIES)
        size, last = self.block_size, (end - 1) // self.block_size
        if not self.context.can_resume:
            return [last]
        indices = []
        boundary = boundaries.next_after(start)
        while boundary <= end:
            indices.append(boundary // size - 1)
            boundary = boundaries.next_after(boundary)
        return indices if indices and indices[-1] == last else [*indices, last]

    def _num_new_blocks(self, request_id: str, start: int, end: int, num_live: int) -> int:
        table = self.tables.get(request_id)
        if table is None:
            return len(self._wanted(request_id, start, end))
        missing, spare = self._changes(table, start, self._wanted(request_id, start, end))
        return max(0, len(missing) - len(spare))

    def _append(self, table: BlockTable, start: int, end: int) -> None:
        wanted = self._wanted(table.request_id, start, end)
        missing, spare = self._changes(table, start, wanted)
        blocks = [table.blocks[i] for i in spare]
        for i in spare:
            table.put(i, self.pool.null_block)
        length = wanted[-1] + 1
        table.cut(length)
        table.extend([self.pool.null_block] * (length - len(table.blocks)))
        blocks += self.pool.get_new_blocks(max(0, len(missing) - len(blocks)))
        for i, block in zip(missing, blocks):
            table.put(i, block)
        self.fence.free(reversed(blocks[len(missing) :]))

    def _changes(self, table: BlockTable, start: int, wanted: list[int]) -> tuple[list[int], list[int]]:
        """Logical blocks that are wanted and null, and those that are not, hold nothing and will not be written by
        a step in flight: a step that was planned and never ran has left them."""
        blocks, keep = table.blocks, set(wanted)
        missing = [i for i in wanted if i >= len(blocks) or blocks[i].is_null]
        ahead = range(self.num_blocks_for(max(start, table.planned_tokens)), len(blocks))
        return missing, [i for i in ahead if i not in keep and not blocks[i].is_null]

    def _store(self, table, hashes, start, end, mask) -> None:
        per_unit = self.context.hash_block_size
        for i in range(start, end):
            block, boundary = table.blocks[i], (i + 1) * self.block_size
            if not block.is_null and (mask is None or mask[i - start]) and boundary % per_unit == 0:
                self.pool.cache_partial_block(block, [hashes[boundary // per_unit - 1]], self.group_id, None)

    def _live_part_is_sound(self, table: BlockTable) -> bool:
        return True
