"""What one layer keeps between steps, as data.

Passes derive a `LayerState` from each stateful op; specs, groups, page sizes and the memory plan follow from it.
Sizes are sympy expressions so that a report can print the formula and a planner can evaluate it.

    bytes of a full layer       = entry_bytes * T                T = context length in tokens
    bytes of a window layer     = entry_bytes * Min(T, W)        W = window in tokens
    bytes of a chunked layer    = entry_bytes * Min(T, C)        C = chunk in tokens
    bytes of a compressed layer = entry_bytes * T / R            R = tokens per entry
    bytes of a cross layer      = entry_bytes * E                E = encoder tokens of the request
    bytes of a recurrent layer  = fixed, whatever T is

A state's page in a block of B tokens is its `tensors(B)`, one after the other:

    page of an attention layer   [ K|V rows: G, B, D + Dv ]                         or their bytes
    page of a latent layer       [ latent rows: B / tokens per entry, latent + rope ]   or their bytes
    page of a recurrent layer    [ state 0 ][ state 1 ] ...          one checkpoint, not B rows
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy

from pagebinder.errors import UnsupportedLayerError

TOKENS = sympy.Symbol("T", integer=True, positive=True)
BLOCK_SIZE = sympy.Symbol("B", integer=True, positive=True)
ENCODER_TOKENS = sympy.Symbol("E", integer=True, positive=True)

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a layer's page: a view of the arena of shape [N, *shape].

    `suffix` tells the tensors of one layer apart: the graph input is `kv_cache_<index><suffix>`.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UnsupportedLayerError(
                f"A layer keeps what later tokens read in {self.dtype}, and there are kernels for float32, bfloat16 "
                "and float16 only: convert the model, with model.float() for example."
            )

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class CacheFormats:
    """How rows of latents are stored. `latent`: rows that attention reads; `index`: keys that an indexer scores.

    "plain" is the activations' dtype; "fp8_ds_mla" stores latents in the 8-bit layout of their family ("fp8_v4" for
    compressed attention, "fp8_v32" for MLA); "fp8_index" and "fp4_index" are layouts of index keys.
    """

    latent: str = "plain"
    index: str = "plain"


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """Base: the state of one layer. `layer` is its module path in the source model, `index` its op number.

    `dtype` names the dtype of what is stored; states of several tensors keep their own dtypes beside it.
    """

    layer: str
    index: int
    dtype: str

    @property
    def kind(self) -> str:
        raise NotImplementedError

    @property
    def entry_bytes(self) -> int:
        """Bytes that one stored entry takes: one token (unless compressed), or one whole recurrent state."""
        raise NotImplementedError

    @property
    def formula(self) -> sympy.Expr:
        """Bytes that a request of TOKENS tokens needs in this layer, without block rounding."""
        raise NotImplementedError

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        """The tensors of this layer's page in a block of `block_size` tokens."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AttentionState(LayerState):
    """K and V of every token: `num_kv_heads` rows of (head_dim + head_dim_v) values.

    `window` (tokens) limits what a query at p sees to the keys j with p - window < j <= p, `chunk` to those with
    j // chunk == p // chunk; neither is full attention. Not both. `layout` says how a row is stored: "plain" is
    values of `dtype`, others are bytes (KV_FORMATS of custom_ops/attention/quantized_cache.py).
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    window: int | None = None
    chunk: int | None = None
    layout: str = "plain"

    def __post_init__(self) -> None:
        assert self.window is None or self.chunk is None, "a layer has a window or a chunk, not both"

    @property
    def kind(self) -> str:
        if self.chunk is not None:
            return "chunked_local"
        return "full_attention" if self.window is None else "sliding_window"

    @property
    def entry_bytes(self) -> int:
        return CacheTensor("", self._shape(1), self._stored_dtype).num_bytes

    def _shape(self, block_size: int) -> tuple[int, int, int]:
        width = self.head_dim + self.head_dim_v
        if self.layout != "plain":
            from pagebinder.custom_ops.attention.quantized_cache import KV_FORMATS

            width = KV_FORMATS[self.layout].row_bytes(width)
        return self.num_kv_heads, block_size, width

    @property
    def _stored_dtype(self) -> str:
        return self.dtype if self.layout == "plain" else "uint8"

    @property
    def formula(self) -> sympy.Expr:
        limit = self.window if self.window is not None else self.chunk
        return self.entry_bytes * (TOKENS if limit is None else sympy.Min(TOKENS, limit))

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        return (CacheTensor("", self._shape(block_size), self._stored_dtype),)


@dataclass(frozen=True, kw_only=True)
class LatentState(AttentionState):
    """Multi-head latent attention: one row of latent + RoPE values per token, which is K and V of all heads.

    `head_dim` is the row's width (latent_dim + rope_dim), `latent_dim` the leading part that serves as V.
    `layout` says how a row is stored: "plain" is `head_dim` values of `dtype`, others are bytes
    (custom_ops/latent/layouts.py). `tokens_per_entry` > 1: a row stands for so many tokens, and is there once the
    last of them is computed; such states have no window.
    """

    latent_dim: int
    rope_dim: int = 0
    tokens_per_entry: int = 1
    num_kv_heads: int = 1
    head_dim_v: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.tokens_per_entry == 1 or self.window is None, "compressed entries have no window"

    @property
    def kind(self) -> str:
        if self.tokens_per_entry > 1:
            return "compressed_latent"
        return "mla_latent" if self.window is None else "sliding_window_mla"

    @property
    def entry_bytes(self) -> int:
        if self.layout == "plain":
            return super().entry_bytes
        from pagebinder.custom_ops.latent.layouts import row_bytes

        return row_bytes(self.layout, width=self.head_dim, rope_dim=self.rope_dim)

    @property
    def formula(self) -> sympy.Expr:
        return super().formula / self.tokens_per_entry

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        rows = block_size // self.tokens_per_entry
        if self.layout == "plain":
            return (CacheTensor("", (rows, self.head_dim), self.dtype),)
        return (CacheTensor("", (rows * self.entry_bytes,), "uint8"),)


@dataclass(frozen=True, kw_only=True)
class CrossAttentionState(LayerState):
    """K and V of the encoder's tokens, written once per request and read by every decoder token."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int

    @property
    def kind(self) -> str:
        return "cross_attention"

    @property
    def entry_bytes(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.head_dim_v) * DTYPE_BYTES[self.dtype]

    @property
    def formula(self) -> sympy.Expr:
        return self.entry_bytes * ENCODER_TOKENS

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        width = self.head_dim + self.head_dim_v
        return (CacheTensor("", (self.num_kv_heads, block_size, width), self.dtype),)


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyState(LayerState):
    """Bidirectional attention inside an encoder: all of it happens in one step, so nothing is kept."""

    dtype: str = "float32"

    @property
    def kind(self) -> str:
        return "encoder_only"

    @property
    def entry_bytes(self) -> int:
        return 0

    @property
    def formula(self) -> sympy.Expr:
        return sympy.Integer(0)

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class RecurrentState(LayerState):
    """State of constant size, whatever the context's length: Mamba, gated delta net, linear attention.

    `shape` is that of one request's state. A block holds one checkpoint of it, at the block's last token.
    """

    shape: tuple[int, ...]

    @property
    def kind(self) -> str:
        return "recurrent"

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def formula(self) -> sympy.Expr:
        return sympy.Integer(self.entry_bytes)

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        return (CacheTensor("", self.shape, self.dtype),)


@dataclass(frozen=True, kw_only=True)
class ShortConvState(RecurrentState):
    """The last kernel - 1 inputs of a causal depthwise convolution: shape (channels, kernel - 1)."""

    @property
    def kind(self) -> str:
        return "short_conv"


@dataclass(frozen=True, kw_only=True)
class RingState(LayerState):
    """A fixed number of rows per request, written round and round: row of token p is p % rows.

    `resume_multiple`: at prefixes of a multiple of so many tokens nothing of the ring is needed, so a cached
    prefix can be resumed there; None: a cached prefix can never be resumed.
    """

    rows: int
    width: int
    resume_multiple: int | None = None

    @property
    def kind(self) -> str:
        return "ring"

    @property
    def entry_bytes(self) -> int:
        return self.rows * self.width * DTYPE_BYTES[self.dtype]

    @property
    def formula(self) -> sympy.Expr:
        return sympy.Integer(self.entry_bytes)

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        return (CacheTensor("", (self.rows, self.width), self.dtype),)
