"""Which layers share a block table, where each layer's page lies in a block, and what that wastes.

One pool, block-outermost: a block is one contiguous span, and every group's pages start at its byte 0. A
block id belongs to one group at a time, so groups alias the same memory.

    byte 0                                                       bytes_per_block
    |-- layer slot 0 --|-- layer slot 1 --|-- layer slot 2 --|
    block b, owned by group 0   [ full.0  ][ full.5  ][ full.11 ]
    block c, owned by group 1   [ win.1   ][ win.3   ][ win.6   ]
    block d, owned by group 2   [ win.2   ][ win.4   ][ padding ]    <- counted as waste and printed

    address(layer, block) = block * bytes_per_block + offset(layer)

Grouping (kv_cache.md section 7): layers that can share a table and are alone of their kind form one group;
kinds with one page size are cut into groups of about equal layer counts; kinds with several page sizes get
one group each and the block is as large as the largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv.spec_builders import spec_from_state
from pagebinder.runtime.kv.specs import (
    BLOCK_SIZE,
    TOKENS,
    KVCacheGroup,
    KVCacheSpec,
    cdiv,
)

if TYPE_CHECKING:
    from pagebinder.custom_ops.layer_state import LayerState

BLOCK_SIZES = (16, 32, 64)
# A head's rows in one block lie side by side. Where such a run ends, the processor's prefetchers start anew: runs
# of 4 KB cost decode attention 3 to 7 % against contiguous memory, runs of 16 to 32 KB nothing that can be measured
# (benchmarks/paged_attention.py). Larger blocks waste more at a request's end and share shorter prefixes.
MIN_RUN_BYTES = 32 * 1024
# A window's blocks are whole: blocks of up to an eighth of the window keep what that wastes small.
BLOCKS_PER_WINDOW = 8


@dataclass(frozen=True, kw_only=True)
class LayerPage:
    """Where one layer's state lies: page `offset_bytes .. + page_bytes` of every block of group `group`."""

    layer: str
    group: int
    slot: int
    offset_bytes: int
    page_bytes: int


@dataclass(frozen=True, kw_only=True)
class KVWaste:
    """What one request holds at `num_tokens` tokens, and how much of that no token uses."""

    num_tokens: int
    held_bytes: int
    padding_bytes: int
    rounding_bytes: int

    @property
    def percent(self) -> float:
        return 100.0 * (self.padding_bytes + self.rounding_bytes) / self.held_bytes


@dataclass(frozen=True, kw_only=True)
class KVPlan:
    """Groups and layout of the whole cache. `layers` is in the order of the states it was planned from."""

    groups: tuple[KVCacheGroup, ...]
    layers: tuple[LayerPage, ...]
    bytes_per_block: int
    max_model_len: int

    @property
    def request_bytes_formula(self) -> sympy.Expr:
        """Bytes a decoding request of TOKENS tokens holds: whole blocks, padding included."""
        return self.bytes_per_block * sum((_blocks_formula(g) for g in self.groups), sympy.Integer(0))

    @property
    def bytes_per_token_formula(self) -> sympy.Expr:
        """Bytes held per token of context, as a function of TOKENS; tends to `bytes_per_token`."""
        return self.request_bytes_formula / TOKENS

    @property
    def bytes_per_token(self) -> float:
        """Bytes that each further token costs once all windows are full."""
        return sum(self.bytes_per_block / g.block_size for g in self.groups if g.spec.grows)

    @property
    def fixed_bytes_per_request(self) -> int:
        """Bytes a long decoding request holds whatever its length: the windows."""
        bounded = [g for g in self.groups if not g.spec.grows]
        return self.bytes_per_block * sum(_num_blocks(g, self.max_model_len) for g in bounded)

    @property
    def padding_bytes_per_block(self) -> tuple[int, ...]:
        """Per group: bytes of each of its blocks that no layer uses."""
        return tuple(self.bytes_per_block - g.page_bytes for g in self.groups)

    def waste(self, num_tokens: int | None = None) -> KVWaste:
        """Waste of one request of `num_tokens` tokens (max_model_len if None): block padding and rounding."""
        tokens = self.max_model_len if num_tokens is None else num_tokens
        held = padding = used = 0
        for group, unused in zip(self.groups, self.padding_bytes_per_block, strict=True):
            blocks = _num_blocks(group, tokens)
            kept_tokens = min(tokens, getattr(group.spec, "window", tokens))
            held += blocks * self.bytes_per_block
            padding += blocks * unused
            used += kept_tokens * group.page_bytes // group.block_size
        return KVWaste(
            num_tokens=tokens,
            held_bytes=held,
            padding_bytes=padding,
            rounding_bytes=held - padding - used,
        )

    def num_blocks_for(self, num_bytes: int) -> int:
        """Blocks, null block included, that fit into `num_bytes`."""
        return num_bytes // self.bytes_per_block

    def max_concurrency(
        self, num_blocks: int, max_model_len: int | None = None, max_in_flight_tokens: int = 1
    ) -> float:
        """How many requests of `max_model_len` tokens the pool holds at once."""
        per_request = self.min_blocks(max_model_len, max_in_flight_tokens) - 1
        return (num_blocks - 1) / per_request

    def min_blocks(self, max_model_len: int | None = None, max_in_flight_tokens: int = 1) -> int:
        """Smallest pool, null block included, in which one request of `max_model_len` tokens can run."""
        length = self.max_model_len if max_model_len is None else max_model_len
        return 1 + sum(g.spec.max_blocks_per_request(length, max_in_flight_tokens) for g in self.groups)

    def describe(self) -> list[str]:
        """The plan in text lines, for reports."""
        waste = self.waste()
        lines = [
            f"KV cache: {len(self.layers)} layers in {len(self.groups)} group(s), "
            f"{self.bytes_per_block:,} bytes per block",
            f"  bytes per token: {self.bytes_per_token:,.0f}   fixed per request: "
            f"{self.fixed_bytes_per_request:,}   bytes of T tokens: {self.request_bytes_formula}",
        ]
        for i, group in enumerate(self.groups):
            window = getattr(group.spec, "window", None)
            kind = group.spec.kind + (f" (window {window:,})" if window else "")
            unused = self.padding_bytes_per_block[i]
            lines.append(
                f"  group {i}: {kind}, {len(group.layers)} layers, block size {group.block_size}, "
                f"{group.page_bytes:,} bytes used and {unused:,} "
                f"({100 * unused / self.bytes_per_block:.1f} %) wasted per block"
            )
        lines.append(
            f"  waste of a request of {waste.num_tokens:,} tokens: {waste.percent:.1f} % of "
            f"{waste.held_bytes:,} bytes (padding {waste.padding_bytes:,}, rounding {waste.rounding_bytes:,})"
        )
        return lines


def plan_kv_cache(
    states: Sequence[LayerState], *, block_size: int | None = None, max_model_len: int
) -> KVPlan:
    """Group the layers and lay out their pages. `block_size` in tokens; None chooses, see `choose_block_size`.

    Layers are named by module path; a path that occurs twice gets `#index` appended.
    Raises ConfigError for bad sizes or no layers, UnsupportedLayerError for a state without a spec.
    """
    size = choose_block_size(states) if block_size is None else block_size
    if size < 1 or max_model_len < 1:
        raise ConfigError(f"block_size ({size}) and max_model_len ({max_model_len}) must be at least 1")
    if not states:
        raise ConfigError("no layer keeps KV state: there is no cache to plan; serve the model without one")
    paths = Counter(state.layer for state in states)
    names = [s.layer if paths[s.layer] == 1 else f"{s.layer}#{s.index}" for s in states]
    specs = {n: spec_from_state(s, size, max_model_len) for n, s in zip(names, states, strict=True)}
    groups = tuple(
        KVCacheGroup(specs[layers[0]], layers, tuple(specs[n] for n in layers))
        for layers in group_layers(specs)
    )
    pages = {page.layer: page for i, group in enumerate(groups) for page in _place_pages(i, group)}
    return KVPlan(
        groups=groups,
        layers=tuple(pages[name] for name in names),
        bytes_per_block=max(group.page_bytes for group in groups),
        max_model_len=max_model_len,
    )


def choose_block_size(states: Sequence[LayerState]) -> int:
    """The smallest of BLOCK_SIZES at which every layer's runs are long enough, or the largest that windows allow."""
    if not states:
        return BLOCK_SIZES[0]
    row_bytes = min(state.entry_bytes // max(1, getattr(state, "num_kv_heads", 1)) for state in states)
    windows = [w for w in (getattr(state, "window", None) for state in states) if w is not None]
    limit = min(windows) // BLOCKS_PER_WINDOW if windows else BLOCK_SIZES[-1]
    allowed = [size for size in BLOCK_SIZES if size <= limit] or [BLOCK_SIZES[0]]
    return next((size for size in allowed if size * row_bytes >= MIN_RUN_BYTES), allowed[-1])


def group_layers(specs: dict[str, KVCacheSpec]) -> list[tuple[str, ...]]:
    """Split layers into groups; kinds keep the order of their first layer, growing kinds come first."""
    buckets: dict[tuple, list[str]] = {}
    for name, spec in specs.items():
        buckets.setdefault(spec.table_key, []).append(name)
    kinds = sorted(buckets.values(), key=lambda names: not specs[names[0]].grows)
    if len(kinds) == 1 or len({spec.page_size_bytes for spec in specs.values()}) > 1:
        return [tuple(names) for names in kinds]
    counts = [len(names) for names in kinds]
    # A group of the smaller kind wastes slots if its block must hold the larger kind; below a ratio of 1.5
    # that costs less than more block tables do.
    per_group = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups: list[tuple[str, ...]] = []
    for names in kinds:
        n = cdiv(len(names), per_group)
        groups.extend(tuple(names[i::n]) for i in range(n))
    return groups


def _place_pages(index: int, group: KVCacheGroup) -> list[LayerPage]:
    pages, offset = [], 0
    for slot, (layer, spec) in enumerate(zip(group.layers, group.layer_specs, strict=True)):
        size = spec.page_size_bytes
        pages.append(LayerPage(layer=layer, group=index, slot=slot, offset_bytes=offset, page_bytes=size))
        offset += size
    return pages


def _blocks_formula(group: KVCacheGroup) -> sympy.Expr:
    return group.spec.blocks_formula.subs(BLOCK_SIZE, group.block_size)


def _num_blocks(group: KVCacheGroup, num_tokens: int) -> int:
    return int(_blocks_formula(group).subs(TOKENS, num_tokens))
