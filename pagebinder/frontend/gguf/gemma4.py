"""Gemma 4 in GGUF files: dense, as a mixture of experts beside an MLP, with embeddings of each layer.

Heads that see everything are wider and turn their first frequencies alone: llama.cpp divides the others by 1e30, so
that transformers' "proportional" RoPE is in a tensor of factors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf.architecture import Architecture
from pagebinder.frontend.gguf.gemma import (
    AROUND_FFN,
    OF_TOKENS,
    OF_TOKENS_IN_LAYER,
    keys_and_values_of_shared,
    num_shared,
    rows_of_tokens,
)
from pagebinder.frontend.gguf.options import FREQUENCIES, Options, by_group, counts, rope_of

LOCAL, GLOBAL = "sliding_attention", "full_attention"
STILL = 1e29  # factors above leave a frequency of nothing


def _gemma4(options: Options) -> dict[str, Any]:
    layers = _layers(options)
    shared = num_shared(options, layers)
    return (
        _attention(options, layers)
        | _widths(options, len(layers), shared)
        | _experts(options)
        | _of_tokens(options)
        | {
            "sliding_window": options.count("attention.sliding_window"),
            "layer_types": layers,
            "num_kv_shared_layers": shared,
            "rope_parameters": _rope(options),
            "final_logit_softcapping": _cap(options),
        }
    )


def _cap(options: Options) -> float | None:
    """Of logits; 0 is none, and llama.cpp has one where a file says nothing."""
    name = "final_logit_softcapping"
    return None if options.get(name) == 0 else options.number(name, 30.0)


def _layers(options: Options) -> list[str]:
    windows = options.of_layers("attention.sliding_window_pattern")
    if windows is None or windows[-1]:  # transformers' last layer sees everything
        options.refuse("attention.sliding_window_pattern")
    return [LOCAL if has_window else GLOBAL for has_window in windows]


def _attention(options: Options, layers: list[str]) -> dict[str, Any]:
    heads = by_group(options, "attention.head_count_kv", layers)
    values = f"blk.{layers.index(GLOBAL)}.attn_v.weight"
    return {
        "head_dim": _width(options, "_swa"),
        "global_head_dim": _width(options),
        "num_key_value_heads": heads.get(LOCAL, heads[GLOBAL]),
        "num_global_key_value_heads": heads[GLOBAL],
        "attention_k_eq_v": not options.has(values),
    }


def _width(options: Options, kind: str = "") -> int:
    """Of heads of a kind; all of it is turned, if only by nothing."""
    width = options.count(f"attention.key_length{kind}")
    for name in (f"attention.value_length{kind}", f"rope.dimension_count{kind}"):
        if options.get(name, width) != width:
            options.refuse(name)
    return width


def _widths(options: Options, num_layers: int, shared: int) -> dict[str, Any]:
    """Layers without keys of their own may have twice the width."""
    groups = ["own"] * (num_layers - shared) + ["shared"] * shared
    found = by_group(options, "feed_forward_length", groups)
    own, other = found["own"], found.get("shared", found["own"])
    if other not in (own, 2 * own):
        options.refuse("feed_forward_length")
    return {"intermediate_size": own, "use_double_wide_mlp": other != own}


def _experts(options: Options) -> dict[str, Any]:
    if not options.get("expert_count"):
        return {}
    count, used = counts(options)
    width = options.count("expert_feed_forward_length")
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": used,
        "moe_intermediate_size": width,
    }


def _of_tokens(options: Options) -> dict[str, Any]:
    if options.get("embedding_length_per_layer_input", 0) == 0:
        return {"hidden_size_per_layer_input": 0}
    return {
        "hidden_size_per_layer_input": options.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": rows_of_tokens(options),
    }


def _rope(options: Options) -> dict[str, Any]:
    width = options.count("attention.key_length")
    rope = rope_of(options, width)
    if rope["rope_type"] != "default":
        options.refuse("rope.scaling.type")
    rope |= {"rope_type": "proportional", "partial_rotary_factor": _part_turned(options, width)}
    local = {"rope_type": "default", "rope_theta": options.number("rope.freq_base_swa", 10_000.0)}
    return {GLOBAL: rope, LOCAL: local}


def _part_turned(options: Options, width: int) -> float:
    options.require(FREQUENCIES[0])
    factors = options.factors(FREQUENCIES[0], width // 2)
    turned = int(np.count_nonzero(factors == 1))
    part = 2 * turned / width
    if not (factors[turned:] > STILL).all() or int(part * width // 2) != turned:
        raise CheckpointError(
            f"{options.file.path}: {FREQUENCIES[0]} has other factors than 1 and, behind these, 1e30: not served."
        )
    return part


ARCHITECTURES = {
    "gemma4": Architecture(
        model_type="gemma4_text", config=_gemma4, whole=OF_TOKENS,
        own=frozenset({"head_dim", "num_key_value_heads", "intermediate_size", "rope_parameters"}),
        names=AROUND_FFN | OF_TOKENS_IN_LAYER | {
            "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        experts="experts", unread=keys_and_values_of_shared, frequencies=FREQUENCIES[:1], in_config=True,
    ),
}  # fmt: skip
