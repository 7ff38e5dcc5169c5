"""Mixtures of experts in GGUF files."""

from __future__ import annotations

from typing import Any

from pagebinder.frontend.gguf.architecture import Architecture, Rule, paired
from pagebinder.frontend.gguf.dense import granite, of_text, qwen3
from pagebinder.frontend.gguf.options import Options, alternating, counts, rope_of

SIGMOID = 2  # of llama.cpp's functions of a router's logits


def experts(options: Options) -> dict[str, Any]:
    count, used = counts(options)
    return {
        "num_experts_per_tok": used,
        "moe_intermediate_size": options.count("expert_feed_forward_length"),
        "num_experts": count,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3(options: Options) -> dict[str, Any]:
    return experts(options) | qwen3(options) | {"norm_topk_prob": True}


def _gpt_oss(options: Options) -> dict[str, Any]:
    count, used = counts(options)
    rope = rope_of(options, options.head_width())
    return {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": options.count("expert_feed_forward_length"),
        "sliding_window": options.count("attention.sliding_window"),
        "layer_types": alternating(options, 2),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def _olmoe(options: Options) -> dict[str, Any]:
    count, used = counts(options)
    return {"num_experts": count, "num_experts_per_tok": used, "norm_topk_prob": False}


def _granitemoe(options: Options) -> dict[str, Any]:
    count, used = counts(options)
    return granite(options) | {"num_local_experts": count, "num_experts_per_tok": used}


ARCHITECTURES = {
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        config=lambda options: experts(options) | {
            "shared_expert_intermediate_size": options.count("expert_shared_feed_forward_length"),
            "norm_topk_prob": False, "use_sliding_window": False,
        },
    ),
    "qwen3moe": Architecture(model_type="qwen3_moe", config=_qwen3),
    "qwen3vlmoe": Architecture(model_type="qwen3_moe", config=of_text(_qwen3)),
    "gpt-oss": Architecture(
        model_type="gpt_oss", config=_gpt_oss,
        names={
            "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
            "attn_sinks": "self_attn.sinks",
        },
        rules=lambda config: {"attn_sinks": Rule(is_bare=True)}, experts_alternate=True,
    ),
    "olmoe": Architecture(model_type="olmoe", config=_olmoe),
    "granitemoe": Architecture(
        model_type="granitemoe", config=_granitemoe, rules=paired, experts="block_sparse_moe.experts",
        names={"ffn_gate_inp": "block_sparse_moe.router"},
    ),
}  # fmt: skip
