"""What one layer keeps between steps, as data.

Passes derive a `LayerState` from each stateful op; specs, groups, page sizes and the memory plan follow from it.
Sizes are sympy expressions so that a report can print the formula and a planner can evaluate it.

    bytes of a full layer     = entry_bytes * T            T = context length in tokens
    bytes of a window layer   = entry_bytes * Min(T, W)    W = window in tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

TOKENS = sympy.Symbol("T", integer=True, positive=True)
BLOCK_SIZE = sympy.Symbol("B", integer=True, positive=True)

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """Base: the state of one layer. `layer` is its module path in the source model, `index` its op number."""

    layer: str
    index: int
    dtype: str

    @property
    def kind(self) -> str:
        raise NotImplementedError

    @property
    def entry_bytes(self) -> int:
        """Bytes that one stored entry (one token, unless compressed) takes."""
        raise NotImplementedError

    @property
    def formula(self) -> sympy.Expr:
        """Bytes that a request of TOKENS tokens needs in this layer, without block rounding."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AttentionState(LayerState):
    """K and V of every token: `num_kv_heads` rows of (head_dim + head_dim_v) values.

    `window` (tokens) limits what a query sees to the keys j with p - window < j <= p; None is full attention.
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    window: int | None = None

    @property
    def kind(self) -> str:
        return "full_attention" if self.window is None else "sliding_window"

    @property
    def entry_bytes(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.head_dim_v) * DTYPE_BYTES[self.dtype]

    @property
    def formula(self) -> sympy.Expr:
        tokens = TOKENS if self.window is None else sympy.Min(TOKENS, self.window)
        return self.entry_bytes * tokens
