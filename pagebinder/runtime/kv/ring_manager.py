"""Ring state: one block for a request's whole life, whose rows are written round and round.

row of token p is p % rows. Nothing of it can be shared: every token overwrites it, so a fork copies it. At
multiples of `resume_multiple` tokens nothing of it is needed, so there (and only there) a prefix can be resumed
with a fresh block.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagebinder.runtime.kv.block_table import BlockTable
from pagebinder.runtime.kv.context import GroupHit
from pagebinder.runtime.kv.manager_base import SingleTypeManager
from pagebinder.runtime.kv.retention import NEVER
from pagebinder.runtime.kv.specs import KVCacheSpec, RingSpec
from pagebinder.runtime.request import Request


class RingManager(SingleTypeManager):
    """Exactly one block, never in the prefix cache."""

    spec: RingSpec
    grows_with_tokens = False
    takes_back = False
    forgets = False

    @staticmethod
    def granularity(spec: KVCacheSpec, hash_block_size: int) -> int | None:
        return spec.resume_multiple

    def table_width(self) -> int:
        return 1

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_length: int, group_ids: Sequence[int]
    ) -> GroupHit:
        length = max_length // self.context.alignment * self.context.alignment
        return GroupHit(length, [[] for _ in group_ids], [None] * len(group_ids))

    def num_blocks_for(self, num_tokens: int) -> int:
        return int(num_tokens > 0)

    def max_admission_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        return 1

    def covered_tokens(self, request_id: str) -> int:
        return NEVER if self.tables[request_id].blocks else 0

    def cache_blocks(self, request: Request, num_tokens: int) -> int:
        return NEVER

    def cache_end(self, request: Request, num_tokens: int) -> None:
        pass

    def state_block(self, num_computed_tokens: int) -> int | None:
        multiple = self.spec.resume_multiple
        holds_rows = num_computed_tokens % multiple > 0 if multiple else num_computed_tokens > 0
        return 0 if holds_rows else None

    def next_cache_at(self, request_id: str) -> int:
        return NEVER

    def _num_new_blocks(self, request_id: str, start: int, end: int, num_live: int) -> int:
        return 1 - num_live

    def _append(self, table: BlockTable, start: int, end: int) -> None:
        if not table.blocks:
            table.extend(self.pool.get_new_blocks(1))

    def _must_copy(self, table: BlockTable, num_computed_tokens: int) -> bool:
        return bool(table.blocks) and self.fence.is_shared(table.blocks[0])
