"""What one kind of layer keeps per block, and how many blocks a request needs of it.

    spec  = kind of state (dims, dtype, window) + block size        one per layer, frozen, hashable
    group = layers that share one block table                       one manager per group
    page  = the bytes of one layer in one block                     one block = the group's pages side by side

Symbols: T context length in tokens, E encoder tokens, B block size in tokens, W window, C chunk, F tokens in flight
(computed in one step). Most blocks that one request holds:

    kind                       while decoding                                 with F tokens in flight
    full, latent, compressed   ceiling(T / B)                                 ceiling(T / B)
    sliding window (latent)    Min(ceiling(T/B), ceiling((W-1)/B) + 1)        ceiling(Min(W-1+F, T) / B) + 1
    chunked local              Min(ceiling(T/B), ceiling(C/B) + straddle)     ceiling(Min(C+F, T) / B) + straddle
    cross                      ceiling(E / B), whatever T
    recurrent, short conv      2: the state read and the state written        + one per checkpoint that is kept
    ring                       1

+ 1 for a window: it may start in the middle of a block. straddle: 1 if chunks do not start at block boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import sympy

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv.checks import require_whole

# The same symbols as in custom_ops.layer_state (sympy compares name and assumptions); written again here
# because importing that package loads torch, and this room must work without it.
TOKENS = sympy.Symbol("T", integer=True, positive=True)
BLOCK_SIZE = sympy.Symbol("B", integer=True, positive=True)
ENCODER_TOKENS = sympy.Symbol("E", integer=True, positive=True)


# Of a cache; the names that layer states have bytes for.
DTYPES = frozenset(("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"))


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-a // b)


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Base: the state of one layer in blocks of `block_size` tokens.

    `entry_bytes`: bytes of one stored entry in one layer. `tokens_per_entry`: tokens that one entry stands for
    (compressed caches; it divides the block size). `dtype` is the cache's dtype by name.
    Formulas are sympy expressions in TOKENS, ENCODER_TOKENS and BLOCK_SIZE, all in pagebinder.runtime.kv:
    spec.request_bytes_formula.subs({TOKENS: 32768, BLOCK_SIZE: spec.block_size}).
    Raises ConfigError for a size that is no whole number or below 1, and for an unknown dtype.
    """

    kind: ClassVar[str]
    # Step metadata that the layers' ops read, by name; the KV group's number is appended.
    step_inputs: ClassVar[tuple[str, ...]] = ("slot_mapping", "block_table")
    block_size: int
    entry_bytes: int
    dtype: str
    tokens_per_entry: int = 1

    def __post_init__(self) -> None:
        for name, unit in (("block_size", "token"), ("entry_bytes", "byte"), ("tokens_per_entry", "token")):
            require_whole(name, getattr(self, name), 1, unit)
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: a cache stores one of {', '.join(sorted(DTYPES))}.")
        assert self.block_size % self.tokens_per_entry == 0, "a block holds whole entries"

    @property
    def table_key(self) -> tuple:
        """Layers with equal keys read the same block table, so they can share a group."""
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer in one block."""
        return self.block_size // self.tokens_per_entry * self.entry_bytes

    @property
    def grows(self) -> bool:
        """Whether a request's blocks grow with its context without limit."""
        return False

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens whose state nothing from position `num_computed_tokens` on reads."""
        return 0

    @property
    def blocks_formula(self) -> sympy.Expr:
        """Most blocks that a decoding request of TOKENS tokens (ENCODER_TOKENS of an encoder) holds."""
        raise NotImplementedError

    @property
    def used_formula(self) -> sympy.Expr:
        """Bytes of one layer that such a request has in use, without rounding to blocks."""
        raise NotImplementedError

    @property
    def request_bytes_formula(self) -> sympy.Expr:
        """Bytes of one layer for such a request, rounded up to whole blocks of BLOCK_SIZE."""
        return self.entry_bytes * BLOCK_SIZE * self.blocks_formula / self.tokens_per_entry

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int, max_encoder_tokens: int = 0
    ) -> int:
        """Most blocks a request ever holds; `max_in_flight_tokens` may be computed in one step."""
        raise NotImplementedError

    def max_bytes_per_request(
        self, max_model_len: int, max_in_flight_tokens: int, max_encoder_tokens: int = 0
    ) -> int:
        """Most bytes of one layer that a request ever holds."""
        blocks = self.max_blocks_per_request(max_model_len, max_in_flight_tokens, max_encoder_tokens)
        return blocks * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values: `num_kv_heads` rows of head_dim + head_dim_v values for each entry."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token of the context is kept."""

    kind: ClassVar[str] = "full_attention"

    @property
    def table_key(self) -> tuple:
        return ("full", self.block_size)

    @property
    def grows(self) -> bool:
        return True

    @property
    def blocks_formula(self) -> sympy.Expr:
        return sympy.ceiling(TOKENS / BLOCK_SIZE)

    @property
    def used_formula(self) -> sympy.Expr:
        return self.entry_bytes * TOKENS / self.tokens_per_entry

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int, max_encoder_tokens: int = 0
    ) -> int:
        return cdiv(max_model_len, self.block_size)


@dataclass(frozen=True, kw_only=True)
class LatentSpec(FullAttentionSpec):
    """Multi-head latent attention: one row a token is K and V of all heads."""

    kind: ClassVar[str] = "mla_latent"


@dataclass(frozen=True, kw_only=True)
class CompressedLatentSpec(LatentSpec):
    """Rows that stand for `tokens_per_entry` tokens each. The op that makes them finds their places itself."""

    kind: ClassVar[str] = "compressed_latent"
    step_inputs: ClassVar[tuple[str, ...]] = ("block_table",)

    @property
    def table_key(self) -> tuple:
        return ("compressed", self.block_size)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A query at position p sees the keys j with p - window < j <= p; older blocks are given back."""

    kind: ClassVar[str] = "sliding_window"
    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("window", self.window, 1, "token")

    @property
    def table_key(self) -> tuple:
        return ("window", self.block_size, self.window)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.window + 1)

    @property
    def blocks_formula(self) -> sympy.Expr:
        behind = sympy.Integer(self.window - 1)
        return sympy.Min(sympy.ceiling(TOKENS / BLOCK_SIZE), sympy.ceiling(behind / BLOCK_SIZE) + 1)

    @property
    def used_formula(self) -> sympy.Expr:
        return self.entry_bytes * sympy.Min(TOKENS, self.window) / self.tokens_per_entry

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int, max_encoder_tokens: int = 0
    ) -> int:
        tokens = min(self.window - 1 + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1


@dataclass(frozen=True, kw_only=True)
class SlidingWindowLatentSpec(SlidingWindowSpec):
    """Latent rows, of which a query sees the last `window`."""

    kind: ClassVar[str] = "sliding_window_mla"


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """A query at position p sees the keys j <= p with j // chunk == p // chunk; earlier chunks are given back."""

    kind: ClassVar[str] = "chunked_local"
    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("chunk", self.chunk, 1, "token")

    @property
    def table_key(self) -> tuple:
        return ("chunk", self.block_size, self.chunk)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.chunk * self.chunk

    @property
    def straddle(self) -> int:
        """1 if a chunk may start in the middle of a block."""
        return 1 if self.chunk % self.block_size else 0

    @property
    def blocks_formula(self) -> sympy.Expr:
        chunk = sympy.ceiling(sympy.Integer(self.chunk) / BLOCK_SIZE) + self.straddle
        return sympy.Min(sympy.ceiling(TOKENS / BLOCK_SIZE), chunk)

    @property
    def used_formula(self) -> sympy.Expr:
        return self.entry_bytes * sympy.Min(TOKENS, self.chunk) / self.tokens_per_entry

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int, max_encoder_tokens: int = 0
    ) -> int:
        tokens = min(self.chunk + max_in_flight_tokens, max_model_len)
        return min(cdiv(tokens, self.block_size) + self.straddle, cdiv(max_model_len, self.block_size))


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """K and V of the encoder's tokens: written once, read by every step of the decoder."""

    kind: ClassVar[str] = "cross_attention"

    @property
    def table_key(self) -> tuple:
        return ("cross", self.block_size)

    @property
    def blocks_formula(self) -> sympy.Expr:
        return sympy.ceiling(ENCODER_TOKENS / BLOCK_SIZE)

    @property
    def used_formula(self) -> sympy.Expr:
        return self.entry_bytes * ENCODER_TOKENS / self.tokens_per_entry

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int, max_encoder_tokens: int = 0
    ) -> int:
        return cdiv(max_encoder_tokens, self.block_size)


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(KVCacheSpec):
    """State of constant size, one checkpoint a block: the state after the block's last computed token.

    Block i of a request is written while tokens [i * B, (i + 1) * B) are computed and read by the first token of
    block i + 1, so a request holds the block it reads and the block it writes. `shape` is the state's.
    """

    kind: ClassVar[str] = "recurrent"
    step_inputs: ClassVar[tuple[str, ...]] = ("block_table",)
    shape: tuple[int, ...]

    @property
    def table_key(self) -> tuple:
        return ("recurrent", self.block_size)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)

    @property
    def page_size_bytes(self) -> int:
        return self.entry_bytes

    @property
    def blocks_formula(self) -> sympy.Expr:
        return sympy.Min(sympy.ceiling(TOKENS / BLOCK_SIZE), sympy.Integer(2))

    @property
    def used_formula(self) -> sympy.Expr:
        return sympy.Integer(self.entry_bytes)

    @property
    def request_bytes_formula(self) -> sympy.Expr:
        return self.entry_bytes * self.blocks_formula

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int, max_encoder_tokens: int = 0
    ) -> int:
        """Every boundary inside a step may be a checkpoint that prefix caching keeps."""
        in_step = cdiv(min(max_in_flight_tokens, max_model_len), self.block_size)
        return min(1 + max(in_step, 1), cdiv(max_model_len, self.block_size))


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """The last inputs of a causal convolution, kept and checkpointed like any recurrent state."""

    kind: ClassVar[str] = "short_conv"


@dataclass(frozen=True, kw_only=True)
class RingSpec(KVCacheSpec):
    """`rows` rows of a request, written round and round; one block for the whole life of a request.

    `resume_multiple`: prefixes of a multiple of so many tokens need nothing of it, so they can be resumed.
    """

    kind: ClassVar[str] = "ring"
    step_inputs: ClassVar[tuple[str, ...]] = ("block_table",)
    rows: int
    resume_multiple: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("rows", self.rows, 1, "row")

    @property
    def table_key(self) -> tuple:
        return ("ring", self.rows, self.resume_multiple)

    @property
    def page_size_bytes(self) -> int:
        return self.entry_bytes

    @property
    def blocks_formula(self) -> sympy.Expr:
        return sympy.Integer(1)

    @property
    def used_formula(self) -> sympy.Expr:
        return sympy.Integer(self.entry_bytes)

    @property
    def request_bytes_formula(self) -> sympy.Expr:
        return sympy.Integer(self.entry_bytes)

    def max_blocks_per_request(
        self, max_model_len: int, max_in_flight_tokens: int, max_encoder_tokens: int = 0
    ) -> int:
        return 1


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers behind one block table. `spec` is the first layer's and decides how blocks are managed.

    `layer_specs` matches `layers` one to one; layers whose pages differ in size may share a group (a bundle) as
    long as their `table_key` is the same. Left empty, every layer has `spec`.
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
