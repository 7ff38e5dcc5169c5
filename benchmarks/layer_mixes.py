"""Layer mixes of known families, as layer states: what a cache is planned from, without weights or a graph."""

from __future__ import annotations

from collections.abc import Callable

from pagebinder.custom_ops.layer_state import (
    AttentionState,
    LatentState,
    LayerState,
    RecurrentState,
    ShortConvState,
)

DTYPE = "bfloat16"


def attention(index: int, heads: int, dim: int, **limits) -> AttentionState:
    return AttentionState(
        layer=f"layers.{index}", index=index, dtype=DTYPE, num_kv_heads=heads, head_dim=dim, head_dim_v=dim,
        **limits,
    )  # fmt: skip


def latent(index: int, latent_dim: int, rope_dim: int) -> LatentState:
    return LatentState(
        layer=f"layers.{index}",
        index=index,
        dtype=DTYPE,
        head_dim=latent_dim + rope_dim,
        latent_dim=latent_dim,
    )


def delta_net(index: int, heads: int, dim: int, channels: int, kernel: int) -> list[LayerState]:
    """A gated delta net layer: its state and the tail of its convolution."""
    return [
        RecurrentState(layer=f"layers.{index}.state", index=index, dtype="float32", shape=(heads, dim, dim)),
        ShortConvState(layer=f"layers.{index}.conv", index=index, dtype=DTYPE, shape=(channels, kernel - 1)),
    ]


def full_only() -> list[LayerState]:
    """Llama-3-8B-like: 32 full layers of 8 x 128."""
    return [attention(i, 8, 128) for i in range(32)]


def window_only() -> list[LayerState]:
    """Mistral-7B-like: 32 layers with a window of 4,096."""
    return [attention(i, 8, 128, window=4096) for i in range(32)]


def full_and_window() -> list[LayerState]:
    """Gemma-3-4B-like: every sixth layer is full, the others have a window of 1,024."""
    return [attention(i, 4, 256, **({} if i % 6 == 5 else {"window": 1024})) for i in range(34)]


def full_and_chunked() -> list[LayerState]:
    """Llama-4-like: every fourth layer is full, the others see chunks of 2,048 (8,192 there; the trace is short)."""
    return [attention(i, 8, 128, **({} if i % 4 == 3 else {"chunk": 2048})) for i in range(48)]


def full_and_recurrent() -> list[LayerState]:
    """Qwen3-Next-like: every fourth layer is full, the others are gated delta nets with a short convolution."""
    layers: list[LayerState] = []
    for i in range(48):
        layers += [attention(i, 2, 256)] if i % 4 == 3 else delta_net(i, 32, 128, 8192, 4)
    return layers


def latent_only() -> list[LayerState]:
    """DeepSeek-V2-Lite-like: 27 layers of latent attention, 512 + 64 values a token."""
    return [latent(i, 512, 64) for i in range(27)]


MIXES: dict[str, Callable[[], list[LayerState]]] = {
    "full": full_only,
    "latent": latent_only,
    "window": window_only,
    "full + window": full_and_window,
    "full + chunked": full_and_chunked,
    "full + recurrent": full_and_recurrent,
}
