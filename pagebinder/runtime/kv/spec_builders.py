"""Layer state -> spec: one builder per kind. A limit that no request can outgrow is no limit.

state.kind             spec
full_attention         FullAttentionSpec
sliding_window         SlidingWindowSpec, or full if window >= max_model_len
chunked_local          ChunkedLocalSpec, or full if chunk >= max_model_len
mla_latent             LatentSpec
sliding_window_mla     SlidingWindowLatentSpec, or latent if window >= max_model_len
compressed_latent      CompressedLatentSpec
cross_attention        CrossAttentionSpec
recurrent              RecurrentSpec
short_conv             ShortConvSpec
ring                   RingSpec
encoder_only           None: nothing is kept
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from pagebinder.errors import UnsupportedLayerError
from pagebinder.runtime.kv.specs import (
    ChunkedLocalSpec,
    CompressedLatentSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    LatentSpec,
    RecurrentSpec,
    RingSpec,
    ShortConvSpec,
    SlidingWindowLatentSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from pagebinder.custom_ops.layer_state import LayerState


def _common(state: LayerState, block_size: int) -> dict:
    return {"block_size": block_size, "entry_bytes": state.entry_bytes, "dtype": state.dtype}


def _rows(state: LayerState, block_size: int) -> dict:
    return _common(state, block_size) | {
        "num_kv_heads": state.num_kv_heads,
        "head_dim": state.head_dim,
        "head_dim_v": state.head_dim_v,
    }


def _attention(state: LayerState, block_size: int, max_model_len: int) -> KVCacheSpec:
    rows = _rows(state, block_size)
    if state.chunk is not None and state.chunk < max_model_len:
        return ChunkedLocalSpec(**rows, chunk=state.chunk)
    if state.window is not None:
        return without_idle_limit(SlidingWindowSpec(**rows, window=state.window), max_model_len)
    return FullAttentionSpec(**rows)


def _latent(state: LayerState, block_size: int, max_model_len: int) -> KVCacheSpec:
    rows = _rows(state, block_size)
    if state.window is not None:
        return without_idle_limit(SlidingWindowLatentSpec(**rows, window=state.window), max_model_len)
    return LatentSpec(**rows)


def _compressed(state: LayerState, block_size: int, max_model_len: int) -> KVCacheSpec:
    # A block holds whole entries; the planner replaces the block size.
    whole = math.lcm(block_size, state.tokens_per_entry)
    return CompressedLatentSpec(**_rows(state, whole), tokens_per_entry=state.tokens_per_entry)


def _cross(state: LayerState, block_size: int, max_model_len: int) -> KVCacheSpec:
    return CrossAttentionSpec(**_rows(state, block_size))


def _recurrent(state: LayerState, block_size: int, max_model_len: int) -> KVCacheSpec:
    return RecurrentSpec(**_common(state, block_size), shape=state.shape)


def _short_conv(state: LayerState, block_size: int, max_model_len: int) -> KVCacheSpec:
    return ShortConvSpec(**_common(state, block_size), shape=state.shape)


def _ring(state: LayerState, block_size: int, max_model_len: int) -> KVCacheSpec:
    # One block for a request's whole life: as many tokens as a request can have.
    return RingSpec(**_common(state, max_model_len), rows=state.rows, resume_multiple=state.resume_multiple)


def _nothing(state: LayerState, block_size: int, max_model_len: int) -> None:
    return None


SPEC_BUILDERS: dict[str, Callable[[LayerState, int, int], KVCacheSpec | None]] = {
    "full_attention": _attention,
    "sliding_window": _attention,
    "chunked_local": _attention,
    "mla_latent": _latent,
    "sliding_window_mla": _latent,
    "compressed_latent": _compressed,
    "cross_attention": _cross,
    "recurrent": _recurrent,
    "short_conv": _short_conv,
    "ring": _ring,
    "encoder_only": _nothing,
}


# What a layer with a limit is if no request can outgrow it: (name of the limit, spec class).
UNLIMITED: dict[type[KVCacheSpec], tuple[str, type[KVCacheSpec]]] = {
    SlidingWindowSpec: ("window", FullAttentionSpec),
    SlidingWindowLatentSpec: ("window", LatentSpec),
    ChunkedLocalSpec: ("chunk", FullAttentionSpec),
}


def without_idle_limit(spec: KVCacheSpec, max_model_len: int) -> KVCacheSpec:
    """The spec as full (or latent) attention if its window or chunk is as long as any request; else itself."""
    limit, unlimited = UNLIMITED.get(type(spec), (None, None))
    if limit is None or getattr(spec, limit) < max_model_len:
        return spec
    return unlimited(**{f.name: getattr(spec, f.name) for f in fields(spec) if f.name != limit})


def spec_from_state(state: LayerState, block_size: int, max_model_len: int) -> KVCacheSpec | None:
    """The spec of a layer's state in blocks of `block_size` tokens; None if the layer keeps nothing.

    Raises UnsupportedLayerError for a kind of state that has no spec.
    """
    builder = SPEC_BUILDERS.get(state.kind)
    if builder is None:
        raise UnsupportedLayerError(
            f"layer {state.layer!r} keeps {state.kind!r} state, which the KV cache cannot hold; "
            f"it can hold: {', '.join(SPEC_BUILDERS)}"
        )
    return builder(state, block_size, max_model_len)
