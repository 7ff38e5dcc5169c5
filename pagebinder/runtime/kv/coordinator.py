"""All groups together: one pool, one hit length, one answer to "does it fit".

    request --> [ group 0: full    ][ group 1: window  ][ group 2: window  ]   one block table each
                       \\                   |                   /
                        +---- one BlockPool: a block belongs to one group at a time

Allocation has two phases: first every group takes hold of its prefix hits, only then does any group allocate.
The other order would let one group evict the blocks that another is about to reuse.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pagebinder.runtime.kv.blocks import BlockPool, KVCacheBlock, require
from pagebinder.runtime.kv.hashing import DEFAULT_SEED, RequestBlockHasher
from pagebinder.runtime.kv.manager_base import SingleTypeManager
from pagebinder.runtime.kv.managers import make_manager
from pagebinder.runtime.kv.specs import KVCacheGroup
from pagebinder.runtime.request import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first `num_tokens` tokens of a request are cached in `blocks` (one list per group).

    The blocks are not referenced yet: a hit is valid until the next allocation.
    """

    num_tokens: int
    blocks: tuple[Sequence[KVCacheBlock], ...]


@dataclass(frozen=True, slots=True)
class LookupGroup:
    """Groups with equal specs cache the same prefixes, so one search serves them all."""

    manager: SingleTypeManager
    group_ids: tuple[int, ...]


class KVCacheManager:
    """Block tables of all requests in all groups, over one pool of `num_blocks` blocks.

    `max_in_flight_tokens`: most tokens of one request that are computed between two calls of
    `allocate_slots` for it; windows must hold them besides what they look back on.
    Raises CacheCapacityError for fewer than 2 blocks.
    """

    def __init__(
        self, plan_groups: Sequence[KVCacheGroup], num_blocks: int, *, max_model_len: int,
        max_in_flight_tokens: int, enable_caching: bool = True, hash_seed: str = DEFAULT_SEED,
    ) -> None:  # fmt: skip
        self.groups = tuple(plan_groups)
        self.max_model_len = max_model_len
        self.max_in_flight_tokens = max_in_flight_tokens
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks, enable_caching)
        sizes = [group.block_size for group in self.groups]
        # Hits end where every group has a block boundary; hashes are as fine as the finest group.
        self.alignment = math.lcm(*sizes)
        self.hasher = RequestBlockHasher(math.gcd(*sizes), hash_seed)
        self.managers = tuple(
            make_manager(
                group.spec, self.pool, i, hash_block_size=self.hasher.hash_block_size,
                max_blocks=group.spec.max_blocks_per_request(max_model_len, max_in_flight_tokens),
            )
            for i, group in enumerate(self.groups)
        )  # fmt: skip
        self._lookup_groups = self._merge_lookup_groups()
        self._no_hit = PrefixHit(0, ((),) * len(self.groups))

    # Prefix cache

    def extend_hashes(self, request: Request) -> None:
        """Hash the request's newly full blocks. Call when tokens were appended."""
        if self.enable_caching:
            self.hasher.extend(request)

    def find_prefix(self, request: Request) -> PrefixHit:
        """Longest prefix that every group can resume from: at most num_tokens - 1, as the last token must
        be computed to get logits.

        A fixed point: each group shortens the candidate until all agree on it. Lengths only shrink, so it
        ends; a prefix-closed group (full attention) is searched once and then cut.
        """
        if not self.enable_caching:
            return self._no_hit
        found: dict[int, list[KVCacheBlock]] = {}
        length, agreed = request.num_tokens - 1, -1
        while length != agreed:
            agreed = length
            for lookup in self._lookup_groups:
                length = min(length, self._search(lookup, request.block_hashes, length, found))
        for i, manager in enumerate(self.managers):
            del found[i][length // manager.block_size :]
        return PrefixHit(length, tuple(found[i] for i in range(len(self.groups))))

    def prefix_may_grow(self, request: Request, num_hit_tokens: int) -> bool:
        """Whether `find_prefix` might now find more than `num_hit_tokens`. O(groups); False is certain.

        A longer hit needs the very next block in every prefix-closed group.
        """
        if not self.enable_caching or num_hit_tokens + self.alignment >= request.num_tokens:
            return False
        for lookup in self._lookup_groups:
            manager = lookup.manager
            last = (num_hit_tokens // manager.block_size + 1) * manager.hashes_per_block - 1
            missing = self.pool.get_cached_block(request.block_hashes[last], lookup.group_ids) is None
            if missing and manager.hits_are_prefix_closed:
                return False
        return True

    def cache_blocks(self, request: Request) -> None:
        """Make what the request has computed so far reusable. Call when the step's results are in."""
        if not self.enable_caching:
            return
        num_tokens = request.num_computed_tokens // self.alignment * self.alignment
        for manager in self.managers:
            manager.cache_blocks(request.request_id, request.block_hashes, num_tokens)

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes; False (and nothing done) while requests hold blocks."""
        return self.pool.reset_prefix_cache()

    # Allocation

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: PrefixHit | None = None, *,
        num_lookahead_tokens: int = 0, full_sequence_must_fit: bool = False, watermark_blocks: int = 0,
    ) -> bool:  # fmt: skip
        """Give the request blocks for its next `num_new_tokens` tokens. False: not enough, none taken.

        A request without blocks starts from `hit`; its `num_computed_tokens` does not count the hit yet.
        Blocks behind the windows are given back either way. `full_sequence_must_fit`: refuse to start a
        request whose known tokens would not fit as a whole. `watermark_blocks` must stay free.
        """
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens must be at least 1, not {num_new_tokens}")
        hit = hit or self._no_hit
        computed = request.num_computed_tokens + hit.num_tokens
        available = self.pool.num_free_blocks - watermark_blocks
        if full_sequence_must_fit and self._blocks_needed(request, request.num_tokens, hit, True) > available:
            return False
        for manager in self.managers:
            manager.remove_skipped_blocks(request.request_id, computed)
        num_tokens = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        needed = self._blocks_needed(request, num_tokens, hit, False)
        if needed > self.pool.num_free_blocks - watermark_blocks:
            return False
        if request.request_id not in self.managers[0].tables:
            for manager, blocks in zip(self.managers, hit.blocks, strict=True):
                manager.allocate_new_computed_blocks(request.request_id, blocks, hit.num_tokens)
        if needed:
            for manager in self.managers:
                manager.allocate_new_blocks(request.request_id, num_tokens)
        return True

    def free(self, request: Request) -> None:
        """Give back all blocks of a request; unknown requests are fine. Hashed blocks stay reusable."""
        for manager in self.managers:
            manager.free(request.request_id)

    def max_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a request of at most `num_tokens` tokens holds at any time, over all groups."""
        return sum(manager.max_admission_blocks(num_tokens) for manager in self.managers)

    # Views

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Per group, the live block table of a running request (0 = null block). Read, do not change."""
        return tuple(manager.block_ids(request_id) for manager in self.managers)

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Share of usable blocks held by requests, 0.0 to 1.0."""
        return self.pool.get_usage()

    def check_integrity(self) -> None:
        """Raise KVCacheIntegrityError unless pool, tables and hashes agree. O(blocks)."""
        held: Counter[int] = Counter()
        for manager in self.managers:
            manager.check_integrity()
            mine = Counter(i for table in manager.tables.values() for i in table.ids if i)
            require(not held.keys() & mine.keys(), f"group {manager.group_id} holds another group's blocks")
            held |= mine
        self.pool.check_integrity(held)

    # Inside

    def _merge_lookup_groups(self) -> tuple[LookupGroup, ...]:
        merged: dict[tuple, list[int]] = {}
        for i, group in enumerate(self.groups):
            merged.setdefault(group.spec.table_key, []).append(i)
        lookups = [LookupGroup(self.managers[ids[0]], tuple(ids)) for ids in merged.values()]
        # Prefix-closed groups first: their one search bounds all others.
        return tuple(sorted(lookups, key=lambda lookup: not lookup.manager.hits_are_prefix_closed))

    def _search(
        self, lookup: LookupGroup, hashes: list[bytes], max_length: int, found: dict[int, list[KVCacheBlock]]
    ) -> int:
        manager, first = lookup.manager, lookup.group_ids[0]
        if first not in found or not manager.hits_are_prefix_closed:
            hits = manager.find_longest_cache_hit(hashes, max_length, self.alignment, lookup.group_ids)
            found.update(zip(lookup.group_ids, hits, strict=True))
        return len(found[first]) * manager.block_size

    def _blocks_needed(self, request: Request, num_tokens: int, hit: PrefixHit, capped: bool) -> int:
        return sum(
            manager.get_num_blocks_to_allocate(
                request.request_id, num_tokens, blocks, hit.num_tokens, capped=capped
            )
            for manager, blocks in zip(self.managers, hit.blocks, strict=True)
        )
