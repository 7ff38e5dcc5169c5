"""Blocks for many requests at once: what a step costs in which everybody decodes.

    group        request a   request b   request c        the free queue is asked once, for all:
    full            +1           .          +1            [ #21 ][ #7 ][ #30 ]
    window          +1           .           .                a      a      c

The blocks go to the places they would go to if `allocate_slots` was called for one request after the other. Whatever
is more than appending blocks (copies, checkpoints inside a chunk, too few free blocks) is left to that.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagebinder.runtime.kv.context import CacheContext
from pagebinder.runtime.kv.manager_base import SingleTypeManager


class BatchedGrowth:
    """Appends to the block tables of running requests in all groups."""

    def __init__(self, managers: Sequence[SingleTypeManager], context: CacheContext) -> None:
        self.pool, self.rows = context.pool, context.rows
        self.managers = tuple(manager for manager in managers if manager.grows_with_tokens)

    def try_grow(
        self, request_ids: Sequence[str], starts: Sequence[int], ends: Sequence[int]
    ) -> list[int] | None:
        """Make room for tokens [start, end) of each request, none of which may need a copy. Returns the tokens that
        are covered then; None, and nothing done, if this is not possible here."""
        groups = []
        for manager in self.managers:
            tables = [manager.tables[request_id] for request_id in request_ids]
            counts = manager.count_appends(tables, starts, ends)
            if counts is None:
                return None
            groups.append((tables, counts))
        num_blocks = sum(sum(counts) for _, counts in groups)
        if not groups or num_blocks > self.pool.num_free_blocks:
            return None
        if num_blocks:
            self._append(request_ids, groups, num_blocks)
        covered = [
            manager.note_appends(tables, starts) for manager, (tables, _) in zip(self.managers, groups)
        ]
        return covered[0] if len(covered) == 1 else list(map(min, *covered))

    def _append(
        self, request_ids: Sequence[str], groups: list[tuple[list, list[int]]], num_blocks: int
    ) -> None:
        blocks, row_of = iter(self.pool.get_new_blocks(num_blocks)), self.rows.row_of
        for i, request_id in enumerate(request_ids):
            row = row_of[request_id]
            for tables, counts in groups:
                for _ in range(counts[i]):
                    tables[i].append(next(blocks), row)
