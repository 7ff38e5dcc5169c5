"""What one kind of layer keeps per block, and how many blocks a request needs of it.

    spec  = kind of state (dims, dtype, window) + block size        one per layer, frozen, hashable
    group = layers that share one block table                       one manager per group
    page  = the bytes of one layer in one block                     one block = the group's pages side by side

Symbols: T context length in tokens, B block size in tokens, W window in tokens.

    blocks of a full layer    = ceiling(T / B)
    blocks of a window layer  = Min(ceiling(T / B), ceiling((W - 1) / B) + 1)     + 1: it may start mid-block
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import sympy

from pagebinder.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from pagebinder.custom_ops.layer_state import LayerState

# The same symbols as in custom_ops.layer_state (sympy compares name and assumptions); written again here
# because importing that package loads torch, and this room must work without it.
TOKENS = sympy.Symbol("T", integer=True, positive=True)
BLOCK_SIZE = sympy.Symbol("B", integer=True, positive=True)


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-a // b)


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Base: the state of one layer in blocks of `block_size` tokens."""

    kind: ClassVar[str]
    block_size: int

    @property
    def table_key(self) -> tuple:
        """Layers with equal keys read the same block table, so they can share a group."""
        return (type(self), self.block_size)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer in one block."""
        raise NotImplementedError

    @property
    def grows(self) -> bool:
        """Whether a request's blocks grow with its context without limit."""
        raise NotImplementedError

    @property
    def blocks_formula(self) -> sympy.Expr:
        """Most blocks that a decoding request of TOKENS tokens holds."""
        raise NotImplementedError

    @property
    def request_bytes_formula(self) -> sympy.Expr:
        """Bytes of one layer for a request of TOKENS tokens, rounded up to whole blocks of BLOCK_SIZE."""
        raise NotImplementedError

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Most blocks a request ever holds; `max_in_flight_tokens` may be computed in one step."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of `block_size` tokens: `num_kv_heads` rows of head_dim + head_dim_v values each.

    `entry_bytes` is one token's size in one layer. `dtype` is the cache's dtype by name.
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    entry_bytes: int

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.entry_bytes

    @property
    def request_bytes_formula(self) -> sympy.Expr:
        return self.entry_bytes * BLOCK_SIZE * self.blocks_formula


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token of the context is kept."""

    kind: ClassVar[str] = "full_attention"

    @property
    def grows(self) -> bool:
        return True

    @property
    def blocks_formula(self) -> sympy.Expr:
        return sympy.ceiling(TOKENS / BLOCK_SIZE)

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return cdiv(max_model_len, self.block_size)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A query at position p sees the keys j with p - window < j <= p; older blocks are given back."""

    kind: ClassVar[str] = "sliding_window"
    window: int

    @property
    def table_key(self) -> tuple:
        return (type(self), self.block_size, self.window)

    @property
    def grows(self) -> bool:
        return False

    @property
    def blocks_formula(self) -> sympy.Expr:
        behind = sympy.Integer(self.window - 1)
        return sympy.Min(sympy.ceiling(TOKENS / BLOCK_SIZE), sympy.ceiling(behind / BLOCK_SIZE) + 1)

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        tokens = min(self.window - 1 + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1


def _attention_spec(state: LayerState, block_size: int, max_model_len: int) -> AttentionSpec:
    common = {
        "block_size": block_size,
        "num_kv_heads": state.num_kv_heads,
        "head_dim": state.head_dim,
        "head_dim_v": state.head_dim_v,
        "dtype": state.dtype,
        "entry_bytes": state.entry_bytes,
    }
    if state.window is None or state.window >= max_model_len:
        return FullAttentionSpec(**common)
    return SlidingWindowSpec(**common, window=state.window)


SPEC_BUILDERS: dict[str, Callable[[LayerState, int, int], KVCacheSpec]] = {
    "full_attention": _attention_spec,
    "sliding_window": _attention_spec,
}


def spec_from_state(state: LayerState, block_size: int, max_model_len: int) -> KVCacheSpec:
    """The spec of a layer's state. A window that no request can outgrow is full attention.

    Raises UnsupportedLayerError for a kind of state that has no spec.
    """
    builder = SPEC_BUILDERS.get(state.kind)
    if builder is None:
        raise UnsupportedLayerError(
            f"layer {state.layer!r} keeps {state.kind!r} state, which the KV cache cannot hold; "
            f"it can hold: {', '.join(SPEC_BUILDERS)}"
        )
    return builder(state, block_size, max_model_len)


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers behind one block table. `spec` is the first layer's and decides how blocks are managed.

    `layer_specs` matches `layers` one to one; layers whose pages differ in size may share a group as long
    as their `table_key` is the same. Left empty, every layer has `spec`.
    """

    spec: KVCacheSpec
    layers: tuple[str, ...]
    layer_specs: tuple[KVCacheSpec, ...] = ()

    def __post_init__(self) -> None:
        if not self.layer_specs:
            object.__setattr__(self, "layer_specs", (self.spec,) * len(self.layers))
        assert len(self.layer_specs) == len(self.layers), "one spec per layer"
        assert all(s.table_key == self.spec.table_key for s in self.layer_specs), "one table per group"

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a block that this group's layers use."""
        return sum(spec.page_size_bytes for spec in self.layer_specs)
