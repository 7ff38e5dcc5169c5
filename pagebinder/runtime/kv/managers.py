"""The rules of each kind of layer, and which manager serves which spec.

    kind              keeps                            a prefix of n tokens can be resumed if cached are
    full attention    every block                      all blocks of [0, n)
    sliding window    the blocks the window reaches    the last ceil((W - 1) / B) blocks of [0, n)

A new kind is one spec class, one manager class and one line in `MANAGERS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagebinder.runtime.kv.blocks import BlockPool
from pagebinder.runtime.kv.manager_base import HitBlocks, SingleTypeManager
from pagebinder.runtime.kv.specs import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    cdiv,
)


class FullAttentionManager(SingleTypeManager):
    """All blocks are needed; prefixes are searched left to right."""

    hits_are_prefix_closed = True

    def find_longest_cache_hit(
        self, hashes: Sequence[bytes], max_length: int, alignment: int, group_ids: Sequence[int]
    ) -> HitBlocks:
        hits: HitBlocks = [[] for _ in group_ids]
        for i in range(max_length // self.block_size):
            found = self.pool.get_cached_block(hashes[(i + 1) * self.hashes_per_block - 1], group_ids)
            if found is None:
                break
            for hit, block in zip(hits, found, strict=True):
                hit.append(block)
        length = len(hits[0]) * self.block_size // alignment * alignment
        for hit in hits:
            del hit[length // self.block_size :]
        return hits

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0


class SlidingWindowManager(SingleTypeManager):
    """Only the last ceil((W - 1) / B) blocks before the resume point are needed; searched right to left."""

    spec: SlidingWindowSpec

    def find_longest_cache_hit(
        self, hashes: Sequence[bytes], max_length: int, alignment: int, group_ids: Sequence[int]
    ) -> HitBlocks:
        # A window of one token needs nothing from the cache; one block keeps the search uniform.
        needed = max(cdiv(self.spec.window - 1, self.block_size), 1)
        num_blocks = max_length // self.block_size
        hits: HitBlocks = [[self.pool.null_block] * num_blocks for _ in group_ids]
        run = end = 0
        for i in reversed(range(num_blocks)):
            if run == 0 and (i + 1) * self.block_size % alignment:
                continue  # a resume point must be aligned in every group
            found = self.pool.get_cached_block(hashes[(i + 1) * self.hashes_per_block - 1], group_ids)
            if found is None:
                run = 0
                continue
            if run == 0:
                end = i + 1
            for hit, block in zip(hits, found, strict=True):
                hit[i] = block
            run += 1
            if run == needed:
                break
        # A run left over here either covers the window or starts the context: both can be resumed from.
        # Shorter runs that were broken off lie to its right and go with the rest of the list.
        for hit in hits:
            del hit[end if run else 0 :]
        return hits

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.spec.window + 1)


MANAGERS: dict[type[KVCacheSpec], type[SingleTypeManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
}


def make_manager(
    spec: KVCacheSpec, pool: BlockPool, group_id: int, *, hash_block_size: int, max_blocks: int
) -> SingleTypeManager:
    """The manager of a group by its spec's class. Raises KeyError for a class that is not registered."""
    return MANAGERS[type(spec)](spec, pool, group_id, hash_block_size=hash_block_size, max_blocks=max_blocks)
