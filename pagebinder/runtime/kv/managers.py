"""The rules of each kind of attention over the decoder's own tokens, and which manager serves which spec.

    kind              keeps                            a prefix of n tokens can be resumed if cached are
    full attention    every block                      all blocks of [0, n)
    sliding window    the blocks the window reaches    the blocks of [n - W + 1, n)
    chunked local     the blocks of the chunk          the blocks of [n // C * C, n): none at a chunk's start
    recurrent, cross attention, ring: in files of their own

The last block may be found by a part of it, in units of the hash block size. A new kind is one spec class, one
manager class and one line in `MANAGERS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagebinder.runtime.kv.context import CacheContext, GroupHit, HitBlocks
from pagebinder.runtime.kv.cross_manager import CrossAttentionManager
from pagebinder.runtime.kv.manager_base import SingleTypeManager
from pagebinder.runtime.kv.recurrent_manager import RecurrentManager
from pagebinder.runtime.kv.ring_manager import RingManager
from pagebinder.runtime.kv.specs import (
    ChunkedLocalSpec,
    CompressedLatentSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    LatentSpec,
    RecurrentSpec,
    RingSpec,
    ShortConvSpec,
    SlidingWindowLatentSpec,
    SlidingWindowSpec,
)


class FullAttentionManager(SingleTypeManager):
    """All blocks are needed; prefixes are searched left to right."""

    hits_are_prefix_closed = True
    forgets = False

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_length: int, group_ids: Sequence[int]
    ) -> GroupHit:
        per_block, unit = self.hashes_per_block, self.context.hash_block_size
        columns: HitBlocks = [[] for _ in group_ids]
        end, num_units = 0, max_length // unit
        for last in range(per_block - 1, num_units, per_block):
            found = self.pool.get_cached_block(hashes[last], group_ids)
            if found is None:
                break
            end = last + 1
            for column, block in zip(columns, found):
                column.append(block)
        # The first block that is not there as a whole may be there in part.
        for last in reversed(range(end, min(end + per_block - 1, num_units))):
            found = self.pool.get_cached_block(hashes[last], group_ids)
            if found is not None:
                end = last + 1
                for column, block in zip(columns, found):
                    column.append(block)
                break
        whole = end // per_block
        tails = [column[whole] if end % per_block else None for column in columns]
        return self.cut(GroupHit(end * unit, [column[:whole] for column in columns], tails), end * unit)

    def cut(self, hit: GroupHit, max_length: int) -> GroupHit:
        """The part of a hit that ends at most at `max_length` tokens: every prefix of it is a hit, too."""
        length = min(hit.num_tokens, max_length) // self.context.alignment * self.context.alignment
        if length == hit.num_tokens:
            return hit
        whole, is_partial = divmod(length, self.block_size)
        tails = [
            (blocks[whole] if whole < len(blocks) else tail) if is_partial else None
            for blocks, tail in zip(hit.blocks, hit.tails)
        ]
        return GroupHit(length, [blocks[:whole] for blocks in hit.blocks], tails)

    def _keeps_every_block(self) -> bool:
        return True


class SuffixManager(SingleTypeManager):
    """Kinds that see only the last tokens: prefixes are searched right to left for the blocks of those."""

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_length: int, group_ids: Sequence[int]
    ) -> GroupHit:
        alignment = self.context.alignment
        length = max_length // alignment * alignment
        while length > 0:
            hit = self._hit_at(hashes, length, group_ids)
            if isinstance(hit, GroupHit):
                return hit
            length = hit // alignment * alignment
        return GroupHit(0, [[] for _ in group_ids], [None] * len(group_ids))

    def _hit_at(self, hashes: Sequence[bytes], length: int, group_ids: Sequence[int]) -> GroupHit | int:
        """The hit of exactly `length` tokens, or the longest length that its miss does not rule out."""
        size, per_block, count = self.block_size, self.hashes_per_block, length // self.block_size
        null, skipped = self.pool.null_block, self.get_num_skipped_tokens(length)
        tails: list = [None] * len(group_ids)
        if length % size and skipped < length:
            found = self.pool.get_cached_block(hashes[length // self.context.hash_block_size - 1], group_ids)
            if found is None:
                return length - 1
            tails = found
        columns: HitBlocks = [[null] * count for _ in group_ids]
        for i in reversed(range(skipped // size, count)):
            found = self.pool.get_cached_block(hashes[(i + 1) * per_block - 1], group_ids)
            if found is None:
                # Every longer prefix sees this block, too. One that ends inside it needs only a part of it.
                return (i + 1) * size - 1
            for column, block in zip(columns, found):
                column[i] = block
        return GroupHit(length, columns, tails)


class SlidingWindowManager(SuffixManager):
    """A query at p sees (p - W, p], so a resume at n needs the blocks of [n - W + 1, n)."""

    spec: SlidingWindowSpec

    def _keeps_every_block(self) -> bool:
        # A boundary lies in every block or at its end, and what it looks back on begins in the block.
        context = self.context
        return (
            not context.retention.is_sparse
            and self.block_size % context.alignment == 0
            and self.spec.window > 1
        )


class ChunkedLocalManager(SuffixManager):
    """A query sees its own chunk only. A block that two chunks share stays until the second is over, too."""

    spec: ChunkedLocalSpec


MANAGERS: dict[type[KVCacheSpec], type[SingleTypeManager]] = {
    FullAttentionSpec: FullAttentionManager,
    LatentSpec: FullAttentionManager,
    CompressedLatentSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    SlidingWindowLatentSpec: SlidingWindowManager,
    ChunkedLocalSpec: ChunkedLocalManager,
    CrossAttentionSpec: CrossAttentionManager,
    RecurrentSpec: RecurrentManager,
    ShortConvSpec: RecurrentManager,
    RingSpec: RingManager,
}


def make_manager(spec: KVCacheSpec, context: CacheContext, group_id: int) -> SingleTypeManager:
    """The manager of a group by its spec's class. Raises KeyError for a class that is not registered."""
    return MANAGERS[type(spec)](spec, context, group_id)
