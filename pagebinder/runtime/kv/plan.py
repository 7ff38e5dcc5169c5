"""The plan of a whole cache: groups, pages, sizes, formulas, and what fits into how much memory.

One pool, block-outermost: a block is one contiguous span, and every group's pages start at its byte 0. A
block id belongs to one group at a time, so groups alias the same memory.

    byte 0                                                       bytes_per_block
    |-- layer slot 0 --|-- layer slot 1 --|-- layer slot 2 --|
    block b, owned by group 0   [ full.0  ][ full.5  ][ full.11 ]
    block c, owned by group 1   [ win.1   ][ win.3   ][ win.6   ]
    block d, owned by group 2   [ win.2   ][ win.4   ][ padding ]    <- counted as waste and printed

    address(layer, block) = block * bytes_per_block + offset(layer)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy

from pagebinder.runtime.kv import capacity
from pagebinder.runtime.kv.alternatives import ConstraintCost, NextBest
from pagebinder.runtime.kv.checks import require_whole
from pagebinder.runtime.kv.counts import blocks_held, bytes_used
from pagebinder.runtime.kv.specs import BLOCK_SIZE, TOKENS, CrossAttentionSpec, KVCacheGroup
from pagebinder.runtime.kv.waste import BlockSplit, GroupWaste, split_blocks, workload_waste
from pagebinder.runtime.kv.workload import Workload

# The group of a layer that keeps nothing (attention inside an encoder); its page is empty.
NO_GROUP = -1


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
        return (
            100.0 * (self.padding_bytes + self.rounding_bytes) / self.held_bytes if self.held_bytes else 0.0
        )


@dataclass(frozen=True, kw_only=True)
class KVPlan:
    """Groups and layout of the whole cache. `layers` is in the order of the states it was planned from.

    `granularity`: tokens that prefix hits are multiples of; None: prefixes can never be resumed.
    `constraint_cost`: what the kernels' wish for long runs costs, if it changes the plan.
    Formulas are sympy expressions in TOKENS and ENCODER_TOKENS (both in pagebinder.runtime.kv; formulas of specs
    also have BLOCK_SIZE): plan.request_bytes_formula.subs({TOKENS: 32768, ENCODER_TOKENS: 1500}).
    Methods raise ConfigError for arguments that are no whole numbers or out of range.
    """

    groups: tuple[KVCacheGroup, ...]
    layers: tuple[LayerPage, ...]
    bytes_per_block: int
    max_model_len: int
    workload: Workload
    granularity: int | None
    next_best: NextBest | None = None
    constraint_cost: ConstraintCost | None = None

    # Formulas

    @property
    def request_bytes_formula(self) -> sympy.Expr:
        """Bytes a decoding request of TOKENS (and ENCODER_TOKENS) holds: whole blocks, padding included.

        Evaluate it with `plan.request_bytes_formula.subs(TOKENS, 32768)`.
        """
        return self.bytes_per_block * sum((_blocks_formula(g) for g in self.groups), sympy.Integer(0))

    @property
    def used_formula(self) -> sympy.Expr:
        """Bytes that such a request has in use: `plan.used_formula.subs(TOKENS, 32768)`."""
        return sum((spec.used_formula for g in self.groups for spec in g.layer_specs), sympy.Integer(0))

    @property
    def bytes_per_token_formula(self) -> sympy.Expr:
        """Bytes held per token of context, as a function of TOKENS; tends to `bytes_per_token`."""
        return self.request_bytes_formula / TOKENS

    @property
    def bytes_per_token(self) -> float:
        """Bytes that each further token costs once all windows are full."""
        return sum(self.bytes_per_block / g.block_size for g in self.groups if g.spec.grows)

    @property
    def bytes_per_encoder_token(self) -> float:
        """Bytes that each token of the encoder costs."""
        cross = (g for g in self.groups if isinstance(g.spec, CrossAttentionSpec))
        return sum(self.bytes_per_block / g.block_size for g in cross)

    @property
    def fixed_bytes_per_request(self) -> int:
        """Bytes a long decoding request holds whatever its length: windows, chunks, states (no encoder)."""
        bounded = [g for g in self.groups if not g.spec.grows]
        return self.bytes_per_block * sum(blocks_held(g.spec, self.max_model_len) for g in bounded)

    # Waste

    @cached_property
    def splits(self) -> tuple[BlockSplit, ...]:
        """How each group fills its blocks."""
        return tuple(split_blocks(self.groups, self._taken_bytes, self.bytes_per_block))

    @property
    def _taken_bytes(self) -> list[int]:
        taken = [0] * len(self.groups)
        for page in self.layers:
            if page.group != NO_GROUP:
                taken[page.group] = max(taken[page.group], page.offset_bytes + page.page_bytes)
        return taken

    @property
    def padding_bytes_per_block(self) -> tuple[int, ...]:
        """Per group: bytes of each of its blocks that no layer uses."""
        return tuple(self.bytes_per_block - g.page_bytes for g in self.groups)

    @cached_property
    def group_waste(self) -> tuple[GroupWaste, ...]:
        """Per group: mean bytes per request of the workload that are in use and wasted, by cause."""
        return workload_waste(self.groups, self.splits, self.workload, self.granularity)

    @property
    def wasted_bytes(self) -> float:
        """Mean waste of a request of the workload."""
        return sum(waste.bytes for waste in self.group_waste)

    @property
    def wasted_percent(self) -> float:
        """Waste as a share of what the requests of the workload take."""
        taken = self.wasted_bytes + sum(waste.used_bytes for waste in self.group_waste)
        return 100 * self.wasted_bytes / taken if taken else 0.0

    def waste(self, num_tokens: int | None = None, encoder_tokens: int = 0) -> KVWaste:
        """Waste of one decoding request of `num_tokens` tokens (max_model_len if None): padding and rounding."""
        tokens = self.max_model_len if num_tokens is None else num_tokens
        _check_lengths(num_tokens=tokens, encoder_tokens=encoder_tokens)
        held = padding = used = 0
        for group, unused in zip(self.groups, self.padding_bytes_per_block, strict=True):
            blocks = blocks_held(group.spec, tokens, encoder_tokens)
            held += blocks * self.bytes_per_block
            padding += blocks * unused
            used += sum(bytes_used(spec, tokens, encoder_tokens) for spec in group.layer_specs)
        return KVWaste(
            num_tokens=tokens,
            held_bytes=held,
            padding_bytes=padding,
            rounding_bytes=held - padding - used,
        )

    # Capacity: see capacity.py

    def num_blocks_for(self, num_bytes: int) -> int:
        """Blocks, null block included, that fit into `num_bytes`."""
        require_whole("num_bytes", num_bytes, 1, "byte")
        return num_bytes // self.bytes_per_block

    def max_concurrency(
        self,
        num_blocks: int,
        max_model_len: int | None = None,
        max_in_flight_tokens: int = 1,
        max_encoder_tokens: int = 0,
    ) -> float:
        """How many requests of `max_model_len` tokens the pool holds at once."""
        require_whole("num_blocks", num_blocks, 1, "block")
        per_request = self.min_blocks(max_model_len, max_in_flight_tokens, max_encoder_tokens) - 1
        return (num_blocks - 1) / per_request

    def min_blocks(
        self, max_model_len: int | None = None, max_in_flight_tokens: int = 1, max_encoder_tokens: int = 0
    ) -> int:
        """Smallest pool, null block included, in which one request of `max_model_len` tokens can run."""
        length = self.max_model_len if max_model_len is None else max_model_len
        _check_lengths(
            max_model_len=length,
            max_in_flight_tokens=max_in_flight_tokens,
            max_encoder_tokens=max_encoder_tokens,
        )
        return capacity.min_blocks(self.groups, length, max_in_flight_tokens, max_encoder_tokens)

    def min_bytes(
        self, max_model_len: int | None = None, max_in_flight_tokens: int = 1, max_encoder_tokens: int = 0
    ) -> int:
        """Smallest memory in which one request of `max_model_len` tokens can run."""
        blocks = self.min_blocks(max_model_len, max_in_flight_tokens, max_encoder_tokens)
        return blocks * self.bytes_per_block

    def capacity(
        self, num_bytes: int, context_tokens: int, *, encoder_tokens: int = 0, prefix_tokens: int = 0
    ) -> int:
        """Decoding requests of `context_tokens` that `num_bytes` hold at once, block 0 put aside.

        `prefix_tokens`: leading tokens that all of them have in common, held once.
        """
        _check_lengths(
            context_tokens=context_tokens, encoder_tokens=encoder_tokens, prefix_tokens=prefix_tokens
        )
        # The last token is computed by each request, so it is never part of a hit.
        common, unit = min(prefix_tokens, context_tokens - 1), self.granularity
        shared = common // unit * unit if unit else 0
        num_blocks = self.num_blocks_for(num_bytes)
        return capacity.requests_that_fit(self.groups, num_blocks, context_tokens, encoder_tokens, shared)

    def max_model_len_for(
        self, num_bytes: int, max_in_flight_tokens: int = 1, max_encoder_tokens: int = 0
    ) -> int:
        """Longest request that `num_bytes` can run, at most the plan's max_model_len; 0: none."""
        require_whole("num_bytes", num_bytes, 0, "byte")
        _check_lengths(max_in_flight_tokens=max_in_flight_tokens, max_encoder_tokens=max_encoder_tokens)
        return capacity.longest_request(
            self.groups, num_bytes // self.bytes_per_block, self.max_model_len, max_in_flight_tokens,
            max_encoder_tokens,
        )  # fmt: skip

    def retained_bytes(self, prefix_tokens: int) -> tuple[int, ...]:
        """Per group: bytes that a cached prefix pins so that it can be resumed (sparse retention)."""
        _check_lengths(prefix_tokens=prefix_tokens)
        blocks = capacity.retained_blocks(self.groups, prefix_tokens, self.granularity)
        return tuple(n * self.bytes_per_block for n in blocks)

    def describe(
        self,
        contexts: Sequence[int] | None = None,
        memory_bytes: Sequence[int] | None = None,
        stateless: Sequence[str] = (),
    ) -> list[str]:
        """The plan in text lines, for reports: blocks at `contexts` tokens, requests that fit `memory_bytes`.

        `stateless`: layers that keep nothing and that the plan does not know of.
        """
        from pagebinder.runtime.kv.plan_text import describe_plan

        return describe_plan(self, contexts, memory_bytes, stateless)


def _check_lengths(**tokens: int) -> None:
    """Numbers of tokens by name: at least 1, but encoders and prefixes may be empty."""
    for name, value in tokens.items():
        least = 0 if name in ("encoder_tokens", "max_encoder_tokens", "prefix_tokens") else 1
        require_whole(name, value, least, "token")


def _blocks_formula(group: KVCacheGroup) -> sympy.Expr:
    return group.spec.blocks_formula.subs(BLOCK_SIZE, group.block_size)
