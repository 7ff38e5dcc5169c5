"""Mixtures of experts in GGUF files: with an expert of all tokens, layers without any, or corrected scores."""

from __future__ import annotations

from typing import Any

import torch

from pagebinder.frontend.gguf.architecture import EXPERTS, Architecture, Rule
from pagebinder.frontend.gguf.dense import LFM2_NAMES, LFM2_WHOLE, lfm2_layers
from pagebinder.frontend.gguf.options import FREQUENCIES, Options, alternating, biases, counts
from pagebinder.frontend.gguf.routing import (
    CORRECTION,
    SHARED,
    SIGMOID,
    corrected,
    num_dense,
    require_gating,
    routed,
)

LARGEST_LLAMA4 = 128  # experts


def _glm4moe(options: Options) -> dict[str, Any]:
    require_gating(options, SIGMOID, otherwise=SIGMOID)
    has_norms = options.has("blk.0.attn_q_norm.weight")
    return routed(options) | biases(options) | {"use_qk_norm": has_norms, "num_nextn_predict_layers": 0}


def _dots1(options: Options) -> dict[str, Any]:
    require_gating(options, SIGMOID, otherwise=0)
    layers = ["full_attention"] * options.num_layers
    return routed(options) | biases(options) | {"sliding_window": None, "layer_types": layers}


def _exaone_moe(options: Options) -> dict[str, Any]:
    """Layers without windows have no positions."""
    require_gating(options, SIGMOID, otherwise=0)
    experts, dense = routed(options), num_dense(options)
    shared = experts.pop("n_shared_experts")
    _require_width(options, "expert_shared_feed_forward_length", shared * experts["moe_intermediate_size"])
    return experts | {
        "num_experts": experts.pop("n_routed_experts"),
        "num_shared_experts": shared,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (options.num_layers - dense),
        "sliding_window": options.count("attention.sliding_window"),
        "sliding_window_pattern": None,
        "layer_types": alternating(options, 4),
    }


def _ernie(options: Options) -> dict[str, Any]:
    """Scores are a softmax, and a token's weights of experts are over their sum."""
    count, used = counts(options)
    width, shared = options.count("expert_feed_forward_length"), options.get("expert_shared_count", 0)
    if not isinstance(shared, int) or shared < 0:
        options.refuse("expert_shared_count")
    _require_width(options, "expert_shared_feed_forward_length", width * shared)
    return {
        "moe_num_experts": count,
        "moe_k": used,
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": num_dense(options),
        "moe_layer_end_index": options.num_layers - 1,
        "moe_layer_interval": options.count("interleave_moe_layer_step"),
        "use_bias": options.has("blk.0.attn_q.bias"),
    }


def _lfm2moe(options: Options) -> dict[str, Any]:
    require_gating(options, SIGMOID, otherwise=0)
    count, used = counts(options)
    return lfm2_layers(options) | {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": options.count("expert_feed_forward_length"),
        "num_dense_layers": num_dense(options),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _hunyuan(options: Options) -> dict[str, Any]:
    """The experts and the one that is shared have one width."""
    count, used = counts(options)
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        _require_width(options, name, options.count("feed_forward_length"))
    if options.get("expert_shared_count", 1) != 1:
        options.refuse("expert_shared_count")
    return biases(options) | {"num_experts": count, "moe_topk": used}


def _minimax_m2(options: Options) -> dict[str, Any]:
    require_gating(options, SIGMOID, otherwise=0)
    count, used = counts(options)
    _require_width(options, "expert_feed_forward_length", options.count("feed_forward_length"))
    return {"num_local_experts": count, "num_experts_per_tok": used}


def _llama4(options: Options) -> dict[str, Any]:
    """Windows and what tunes queries without positions are llama.cpp's, as are norms of all but the largest one."""
    count, used = counts(options)
    step, layers = options.count("interleave_moe_layer_step"), range(options.num_layers)
    turns = [int((layer + 1) % 4 != 0) for layer in layers]
    return {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": options.count("expert_feed_forward_length"),
        "intermediate_size_mlp": options.count("feed_forward_length"),
        "moe_layers": list(layers[step - 1 :: step]),
        "interleave_moe_layer_step": step,
        "use_qk_norm": count != LARGEST_LLAMA4,
        "no_rope_layers": turns,
        "layer_types": ["chunked_attention" if turned else "full_attention" for turned in turns],
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def _require_width(options: Options, name: str, width: int) -> None:
    """Raises CheckpointError: the file says another width than transformers' model has."""
    if options.get(name, width) != width:
        options.refuse(name)


ARCHITECTURES = {
    "glm4moe": Architecture(
        model_type="glm4_moe", config=_glm4moe, names=SHARED | {"post_attention_norm": "post_attention_layernorm"},
        rules=corrected, turns_parts=True,
    ),
    "dots1": Architecture(
        model_type="dots1", config=_dots1, names=SHARED, rules=corrected,
        no_biases=(*CORRECTION[1:], "self_attn.o_proj.bias"),
    ),
    "exaone-moe": Architecture(
        model_type="exaone_moe", config=_exaone_moe, names=SHARED, rules=corrected, frequencies=FREQUENCIES[:1]
    ),
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe", config=_ernie, rules=corrected, no_biases=CORRECTION[1:],
        names=SHARED | {"exp_probs_b": "mlp.gate.moe_statics.e_score_correction_bias"},
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe", config=_lfm2moe, own=frozenset({"num_key_value_heads"}), rules=corrected,
        whole=LFM2_WHOLE, experts="feed_forward.experts",
        names=LFM2_NAMES | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias"},
    ),
    "hunyuan-moe": Architecture(
        model_type="hunyuan_v1_moe", config=_hunyuan,
        names={
            "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg", "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj", "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
    ),
    "llama4": Architecture(
        model_type="llama4_text", config=_llama4, experts="feed_forward.experts", frequencies=FREQUENCIES[:1],
        names={
            "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj", "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
        rules=lambda config: dict.fromkeys(EXPERTS, Rule(make=lambda *rows: torch.cat(rows, dim=1).mT)),
    ),
    "minimax-m2": Architecture(
        model_type="minimax_m2", config=_minimax_m2, rules=corrected, turns_parts=True,
        names={"exp_probs_b": "mlp.e_score_correction_bias"},
    ),
}  # fmt: skip
