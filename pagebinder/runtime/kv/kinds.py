"""Layers that may share a block table, and the ways to lay them out.

    kind      layers whose table_key is equal at equal block sizes: full attention, windows of 1024, ...
    layout    block size B and number n of groups that a kind is cut into; layers are dealt out in turns

    kind of 5 layers, n = 2      group 0  [L0][L2][L4]      need(B, 2) = 3 pages: what a block must hold
                                 group 1  [L1][L3]

Layers with pages of different sizes (a bundle) are dealt out from the largest page down, so groups stay balanced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv.constraints import KernelConstraints
from pagebinder.runtime.kv.specs import (
    CrossAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    RecurrentSpec,
    RingSpec,
)

# Prefixes are hashed in units of so many tokens, or of what divides all block sizes.
MATCH_UNIT = 16
# Beyond so many sizes of pages behind one table, or variants in all, only the extremes are tried.
MAX_PAGE_SIZES, MAX_VARIANTS = 4, 32


def at(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    """The spec in blocks of another size; a ring's block is a request's whole life."""
    return spec if isinstance(spec, RingSpec) else replace(spec, block_size=block_size)


@dataclass(frozen=True)
class LayerKind:
    """Layers by name with their specs (at any block size), and the block sizes that they may have."""

    layers: tuple[str, ...]
    specs: tuple[KVCacheSpec, ...]
    block_sizes: tuple[int, ...]
    constraints: KernelConstraints

    @property
    def grows(self) -> bool:
        return self.specs[0].grows

    @property
    def is_recurrent(self) -> bool:
        return isinstance(self.specs[0], RecurrentSpec)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Layer numbers from the largest page down; equal ones stay in order."""

        def page_per_token(i: int) -> float:
            return self.specs[i].entry_bytes / self.specs[i].tokens_per_entry

        return tuple(sorted(range(len(self.layers)), key=lambda i: -page_per_token(i)))

    def members(self, n: int) -> list[list[int]]:
        """Layer numbers of each of `n` groups."""
        return [sorted(self.order[i::n]) for i in range(n)]

    def page_bytes(self, block_size: int) -> list[int]:
        """Aligned bytes of each layer's page."""
        return [self.constraints.align(at(spec, block_size).page_size_bytes) for spec in self.specs]

    def needs(self, block_size: int, most_groups: int) -> list[int]:
        """Bytes that a block must hold for n = 1, 2, ... groups; they never grow with n."""
        pages = self.page_bytes(block_size)
        # Pages are dealt from the largest down, so the first group is the largest.
        return [
            sum(pages[i] for i in self.order[::n]) for n in range(1, min(most_groups, len(self.layers)) + 1)
        ]

    def groups(self, block_size: int, n: int) -> list[KVCacheGroup]:
        """The groups of one layout."""
        made = []
        for members in self.members(n):
            specs = tuple(at(self.specs[i], block_size) for i in members)
            made.append(KVCacheGroup(specs[0], tuple(self.layers[i] for i in members), specs))
        return made


def kind_variants(
    specs: Mapping[str, KVCacheSpec],
    constraints: KernelConstraints,
    block_size: int | None,
    max_model_len: int | None = None,
    max_encoder_tokens: int | None = None,
) -> list[list[LayerKind]]:
    """The ways to sort layers into kinds. `block_size`: the user's, for layers with rows; lengths: None is no limit.

    Layers that could share a table but have pages of different sizes may also be kept apart, with block sizes of
    their own: every partition of the page sizes is a variant (only "all together" and "all apart" where those are
    too many). Kinds are in the order of their first layer, growing ones first.
    Raises ConfigError if a kind can have no block size.
    """
    common = math.lcm(*(spec.tokens_per_entry for spec in specs.values()))
    tables: dict[tuple, dict[tuple, list[str]]] = {}
    for name, spec in specs.items():
        sizes = tables.setdefault(at(spec, common).table_key, {})
        sizes.setdefault((spec.entry_bytes, spec.tokens_per_entry), []).append(name)
    choices = [_partitions(list(sizes.values())) for sizes in tables.values()]
    if math.prod(map(len, choices)) > MAX_VARIANTS:
        choices = [[p[0], p[-1]] if len(p) > 1 else p for p in choices]
    number = {name: i for i, name in enumerate(specs)}
    variants = []
    for choice in islice(product(*choices), MAX_VARIANTS):
        parts = (sorted((n for names in part for n in names), key=number.get) for p in choice for part in p)
        kinds = [
            _kind(tuple(names), specs, constraints, block_size, (max_model_len, max_encoder_tokens))
            for names in sorted(parts, key=lambda names: number[names[0]])
        ]
        variants.append(sorted(kinds, key=lambda kind: not kind.grows))
    return variants


def _partitions(parts: list) -> list[list[list]]:
    """All set partitions of `parts`; the first has all together, the last all apart."""
    if len(parts) == 1:
        return [[parts]]
    if len(parts) > MAX_PAGE_SIZES:
        return [[parts], [[part] for part in parts]]
    first, found = parts[0], []
    for rest in _partitions(parts[1:]):
        found += [[*rest[:i], [first, *rest[i]], *rest[i + 1 :]] for i in range(len(rest))]
        found.append([[first], *rest])
    return found


def _kind(
    names: tuple[str, ...],
    specs: Mapping[str, KVCacheSpec],
    constraints: KernelConstraints,
    block_size: int | None,
    limits: tuple[int | None, int | None],
) -> LayerKind:
    members = tuple(specs[name] for name in names)
    longest = limits[isinstance(members[0], CrossAttentionSpec)]
    sizes = constraints.block_sizes(members, block_size, longest)
    if not sizes:
        coarsest = max(names, key=lambda name: specs[name].tokens_per_entry)
        raise _no_block_size(coarsest, specs[coarsest].tokens_per_entry, members, constraints, block_size)
    return LayerKind(names, members, sizes, constraints)


def _no_block_size(
    layer: str,
    tokens_per_entry: int,
    specs: tuple[KVCacheSpec, ...],
    constraints: KernelConstraints,
    block_size: int | None,
) -> ConfigError:
    multiple = math.lcm(*(spec.tokens_per_entry for spec in specs))
    offered = constraints.attention_blocks if block_size is None else block_size
    return ConfigError(
        f"layer {layer!r} stores one entry per {tokens_per_entry} tokens, so its blocks hold a multiple of "
        f"{multiple} tokens; block_size={offered} is none: leave block_size out, or use {multiple}."
    )


def granularity(specs: Iterable[KVCacheSpec]) -> int | None:
    """Tokens that prefix hits are multiples of, as the managers have it; None: a prefix can never be resumed.

    Layers with rows can be hit in the middle of a block (the request goes on in a copy of it), at multiples of
    MATCH_UNIT tokens or of what divides their blocks; recurrent layers at checkpoints; rings as their state says.
    """
    specs = list(specs)
    rings = [spec.resume_multiple for spec in specs if isinstance(spec, RingSpec)]
    if None in rings:
        return None
    rows = [s.block_size for s in specs if not isinstance(s, (RingSpec, RecurrentSpec, CrossAttentionSpec))]
    states = [spec.block_size for spec in specs if isinstance(spec, RecurrentSpec)]
    unit = math.gcd(MATCH_UNIT, *rows) if rows or not (states or rings) else 1
    return math.lcm(unit, *rings, *states)


def finest_granularity(kinds: list[LayerKind]) -> int | None:
    """The granularity of everything but checkpoints; None: no prefix can be resumed.

    Block sizes of layers with rows matter only where some are no multiple of MATCH_UNIT; the finest is assumed.
    """
    others = [at(kind.specs[0], b) for kind in kinds if not kind.is_recurrent for b in kind.block_sizes]
    only_encoder = all(isinstance(spec, CrossAttentionSpec) for spec in others)
    return 1 if only_encoder and any(kind.is_recurrent for kind in kinds) else granularity(others)


def granularities(kinds: list[LayerKind]) -> list[int | None]:
    """The granularities that layouts of these kinds can have; [None]: no prefix can be resumed."""
    finest = finest_granularity(kinds)
    if finest is None:
        return [None]
    reachable = {finest}
    for kind in kinds:
        if kind.is_recurrent:
            reachable = {math.lcm(g, size) for g in reachable for size in kind.block_sizes}
    return sorted(reachable)
