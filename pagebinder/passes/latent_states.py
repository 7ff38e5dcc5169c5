"""The states of ops over latent rows: MLA, indexers, and DeepSeek-V4's compressed attention.

    op                      keeps                        layout
    mla_attention           [latent | rotated key] rows  plain, fp8_v32
    index_topk, per token   index keys                   plain, fp8_index, fp4_index
    compress                running sums of a window     float32: sums of exponentials do not survive rounding
                            its entries                  that of whoever reads them: an indexer or attention
    compressed_attention    rows of the window           plain, fp8_v4

Layouts are those of custom_ops/latent/layouts.py.
"""

from __future__ import annotations

import torch
from torch.fx import Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.layer_state import CacheFormats, LatentState, LayerState, RecurrentState
from pagebinder.errors import ConfigError, UnsupportedLayerError
from pagebinder.graph_tools import dtype_name, is_call, module_path, val

COMPRESS = torch.ops.pagebinder.compress.default
INDEX_TOPK = torch.ops.pagebinder.index_topk.default
COMPRESSED_ATTENTION = torch.ops.pagebinder.compressed_attention.default
# A compressor's sums, per channel: the largest gate, the sum of exponentials, the sum of weighted values.
NUM_SUMS = 3


def _kept(states: list[LayerState]) -> list[LayerState]:
    """The states, if their rows fit the layouts. Raises ConfigError where they do not."""
    for state in states:
        try:
            _ = state.entry_bytes
        except ValueError as error:
            option = "index_dtype" if state.layout in ("fp8_index", "fp4_index") else "kv_dtype"
            raise ConfigError(
                f"{state.layer}: rows of {state.head_dim} channels do not fit the layout that {option} asks for "
                f'({error}); leave kv_dtype and index_dtype "auto".'
            ) from error
    return states


def mla_states(node: Node, index: int, max_model_len: int, formats: CacheFormats) -> list[LayerState]:
    """One row [latent | rotated key] per token."""
    latent, k_rope = val(node.args[2]), val(node.args[3])
    latent_dim, rope_dim = int(latent.shape[-1]), int(k_rope.shape[-1])
    window = node.kwargs.get("window")
    return _kept(
        [
            LatentState(
                layer=module_path(node) or f"mla_{index}",
                index=index,
                dtype=dtype_name(latent),
                head_dim=latent_dim + rope_dim,
                latent_dim=latent_dim,
                rope_dim=rope_dim,
                window=window if window is not None and window < max_model_len else None,
                layout="plain" if formats.latent == "plain" else "fp8_v32",
            )
        ]
    )


def index_states(node: Node, index: int, max_model_len: int, formats: CacheFormats) -> list[LayerState]:
    """One index key per token; nothing where a compressor keeps them."""
    k = node.args[1]
    if is_call(k, COMPRESS):
        return []
    return _kept(
        [
            LatentState(
                layer=f"{module_path(node) or f'indexer_{index}'}.keys",
                index=index,
                dtype=dtype_name(val(k)),
                head_dim=int(val(k).shape[-1]),
                latent_dim=int(val(k).shape[-1]),
                layout=formats.index,
            )
        ]
    )


def compressor_states(node: Node, index: int, max_model_len: int, formats: CacheFormats) -> list[LayerState]:
    """The sums of the windows that are open, and the entries of those that are closed."""
    kv, width = val(node.args[0]), int(val(node).shape[-1])
    layer = module_path(node) or f"compressor_{index}"
    sums = RecurrentState(
        layer=f"{layer}.sums", index=index, dtype="float32", shape=(num_windows_open(node), NUM_SUMS, width)
    )
    layout = _entry_layout(node, formats)
    entries = LatentState(
        layer=f"{layer}.entries",
        index=index + 1,
        dtype=dtype_name(kv),
        head_dim=width,
        latent_dim=width,
        rope_dim=rope_dim_of(node, layout),
        layout=layout,
        tokens_per_entry=node.kwargs["ratio"],
    )
    return [sums, *_kept([entries])]


def window_states(node: Node, index: int, max_model_len: int, formats: CacheFormats) -> list[LayerState]:
    """The rows of the last `window` tokens, K and V in one."""
    kv, window = val(node.args[1]), node.kwargs["window"]
    layout = "plain" if formats.latent == "plain" else "fp8_v4"
    return _kept(
        [
            LatentState(
                layer=f"{module_path(node) or f'compressed_attention_{index}'}.window",
                index=index,
                dtype=dtype_name(kv),
                head_dim=int(kv.shape[-1]),
                latent_dim=int(kv.shape[-1]),
                rope_dim=rope_dim_of(node, layout),
                window=window if window < max_model_len else None,
                layout=layout,
            )
        ]
    )


def num_windows_open(node: Node) -> int:
    """Entries that a compressor adds to at once: with overlap a token counts for its own window and the next."""
    return 2 if node.kwargs["overlap"] else 1


def rope_dim_of(node: Node, layout: str) -> int:
    """Trailing channels of a row that are rotated, and so stored in 16 bits; 0 where a layout makes no difference.

    What compressors rotate, the window's rows do, too: both are keys of one softmax.
    """
    if layout != "fp8_v4":
        return 0
    if is_call(node, COMPRESS):
        return 2 * int(val(node.args[4]).shape[-1])
    found = {rope_dim_of(other, layout) for other in node.graph.nodes if is_call(other, COMPRESS)
             and _entry_layout(other, CacheFormats(latent="fp8_ds_mla")) == "fp8_v4"}  # fmt: skip
    if len(found) != 1:
        raise UnsupportedLayerError(
            "the 8-bit layout keeps rotated channels in 16 bits, and how many they are is read off the compressors "
            f'of the model, of which {"none" if not found else "no two"} agree; use kv_dtype="auto"'
        )
    return found.pop()


def _entry_layout(node: Node, formats: CacheFormats) -> str:
    """By who reads the entries. Raises UnsupportedLayerError unless all readers want the same."""
    layouts = set()
    for user in node.users:
        if is_call(user, INDEX_TOPK) and user.args[1] is node:
            layouts.add(formats.index)
        elif is_call(user, COMPRESSED_ATTENTION) and user.args[2] is node:
            layouts.add("plain" if formats.latent == "plain" else "fp8_v4")
        else:
            raise UnsupportedLayerError(
                f"{module_path(node)}: {user.name} reads the compressed entries; only an indexer and compressed "
                "attention may"
            )
    if len(layouts) != 1:
        raise UnsupportedLayerError(
            f"{module_path(node)}: its entries are read by nothing, or in two layouts ({sorted(layouts)})"
        )
    return layouts.pop()
