"""The longest prefix that all groups can resume from, whatever their kinds and block sizes.

full attention   |====|====|====|==  |        <= 14 tokens
window           .........|====|====|         <= 12, given 14          a fixed point: each group shortens the
recurrent        ........|=====|              <= 8, given 12           candidate until all agree on it
window, again    ....|====|                   8: agreed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagebinder.runtime.kv.context import GroupHit, GroupPrefix
from pagebinder.runtime.kv.cross_manager import CrossAttentionManager
from pagebinder.runtime.kv.manager_base import SingleTypeManager
from pagebinder.runtime.kv.managers import MANAGERS
from pagebinder.runtime.kv.ring_manager import RingManager
from pagebinder.runtime.kv.specs import KVCacheGroup
from pagebinder.runtime.request import Request

DEFAULT_MATCH_UNIT = 16


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first `num_tokens` tokens of a request are cached: `groups` says where, one entry per group.

    The blocks are not referenced yet: a hit is valid until the next allocation. `longest_tokens`: what some
    group would have, more than all together if another one lacks its part.
    """

    num_tokens: int
    groups: tuple[GroupPrefix, ...]
    longest_tokens: int = 0

    @property
    def blocks(self) -> tuple[Sequence, ...]:
        """Per group, the whole blocks of the hit."""
        return tuple(group.blocks for group in self.groups)


@dataclass(frozen=True, slots=True)
class LookupGroup:
    """Groups with equal tables cache the same prefixes, so one search serves them all."""

    manager: SingleTypeManager
    group_ids: tuple[int, ...]


def resolve_match_unit(groups: Sequence[KVCacheGroup], wanted: int | None) -> int:
    """Tokens per prefix hash. Raises ValueError if `wanted` does not divide a block of an attention group."""
    kinds = [(MANAGERS[type(group.spec)], group.spec) for group in groups]
    sizes = [spec.block_size for kind, spec in kinds if kind.granularity(spec, -1) == -1]
    if wanted is None:
        others = [
            kind.granularity(spec, -1) or 0 for kind, spec in kinds if kind is not CrossAttentionManager
        ]
        return math.gcd(DEFAULT_MATCH_UNIT, *sizes) if sizes else math.gcd(*others) or DEFAULT_MATCH_UNIT
    if wanted < 1 or any(size % wanted for size in sizes):
        raise ValueError(
            f"prefix_match_unit is {wanted}; it must divide every block size: {sorted(set(sizes))}"
        )
    return wanted


def resolve_alignment(groups: Sequence[KVCacheGroup], match_unit: int) -> int | None:
    """Hits are multiples of so many tokens; None if a group can never be resumed."""
    steps = [MANAGERS[type(group.spec)].granularity(group.spec, match_unit) for group in groups]
    return None if None in steps else math.lcm(match_unit, *steps)


class PrefixSearch:
    """Finds prefix hits over the managers of all groups."""

    def __init__(self, managers: Sequence[SingleTypeManager], alignment: int) -> None:
        self.managers, self.alignment = tuple(managers), alignment
        self.cross = [m for m in managers if isinstance(m, CrossAttentionManager)]
        merged: dict[tuple, list[int]] = {}
        for manager in self.managers:
            if not isinstance(manager, (CrossAttentionManager, RingManager)):
                merged.setdefault(manager.spec.table_key, []).append(manager.group_id)
        lookups = [LookupGroup(self.managers[ids[0]], tuple(ids)) for ids in merged.values()]
        # Prefix-closed groups first: their one search bounds all others.
        self.lookups = sorted(lookups, key=lambda lookup: not lookup.manager.hits_are_prefix_closed)

    def nothing(self) -> PrefixHit:
        return PrefixHit(0, (GroupPrefix(),) * len(self.managers))

    def find(self, request: Request, max_length: int) -> PrefixHit:
        """The longest common hit of at most `max_length` tokens. Lengths only shrink, so the search ends."""
        hashes, found, longest = request.block_hashes, {}, 0
        length, agreed = max_length // self.alignment * self.alignment, -1
        while length != agreed:
            agreed = length
            for lookup in self.lookups:
                hit = found[lookup] = self._search(lookup, hashes, length, found.get(lookup))
                longest = max(longest, hit.num_tokens)
                if lookup.manager.hits_are_prefix_closed:
                    hit = lookup.manager.cut(hit, length)
                length = hit.num_tokens
        prefixes = [GroupPrefix(length)] * len(self.managers)
        for lookup, hit in found.items():
            if lookup.manager.hits_are_prefix_closed:
                hit = lookup.manager.cut(hit, length)
            for group_id, blocks, tail in zip(lookup.group_ids, hit.blocks, hit.tails):
                prefixes[group_id] = GroupPrefix(length, blocks, tail)
        for manager, blocks in zip(self.cross, self._find_encoder(request)):
            prefixes[manager.group_id] = GroupPrefix(length, blocks)
        return PrefixHit(length, tuple(prefixes), max(longest, length))

    def may_grow(self, request: Request, num_hit_tokens: int) -> bool:
        """Whether a longer hit is possible. O(groups); False is certain.

        It needs the very next unit in every prefix-closed group.
        """
        next_length = num_hit_tokens + self.alignment
        if next_length >= request.num_tokens:
            return False
        last = next_length // self.managers[0].context.hash_block_size - 1
        pool = self.managers[0].pool
        return all(
            pool.get_cached_block(request.block_hashes[last], lookup.group_ids) is not None
            for lookup in self.lookups
            if lookup.manager.hits_are_prefix_closed
        )

    def _search(
        self, lookup: LookupGroup, hashes: Sequence[bytes], max_length: int, before: GroupHit | None
    ) -> GroupHit:
        manager = lookup.manager
        if before is not None and manager.hits_are_prefix_closed:
            return before
        return manager.find_longest_hit(hashes, max_length, lookup.group_ids)

    def _find_encoder(self, request: Request) -> list[list]:
        """The encoder's blocks in every cross group, or nothing: the encoder runs for all groups at once."""
        found = [manager.find_encoder(request) for manager in self.cross]
        return [] if any(blocks is None for blocks in found) else found
