"""Models with latent attention for gguf_files.py."""

from __future__ import annotations

import torch

from tests.frontend.gguf_files import EXPANDED, MODELS, TENSORS, THETA, Stored, named_tensors

LATENT, TURNED, KEYS, VALUES = 64, 32, 80, 32
WIDTHS = {
    "num_key_value_heads": 4, "kv_lora_rank": LATENT, "qk_rope_head_dim": TURNED, "qk_nope_head_dim": KEYS - TURNED,
    "v_head_dim": VALUES, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
SPLIT = {  # today's files: one head of keys and values, that of the latent
    "attention.head_count_kv": 1, "attention.key_length": LATENT + TURNED, "attention.value_length": LATENT,
    "attention.key_length_mla": KEYS, "attention.value_length_mla": VALUES,
}  # fmt: skip
WHOLE = {"attention.key_length": KEYS, "attention.value_length": VALUES}  # older ones
FILE = {
    "attention.kv_lora_rank": LATENT, "rope.dimension_count": TURNED, "leading_dense_block_count": 1,
    "expert_count": 8, "expert_used_count": 3, "expert_shared_count": 2, "expert_feed_forward_length": 64,
}  # fmt: skip


def _yarn(factor: float) -> tuple[dict, dict]:
    of_model = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": factor,
        "mscale_all_dim": factor,
    }  # fmt: skip
    of_file = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_log_multiplier": factor / 10,
    }  # fmt: skip
    return {"rope_parameters": THETA | of_model}, of_file


def _v2() -> None:
    rope, of_file = _yarn(0.707)
    lite = WIDTHS | rope | {"q_lora_rank": None, "topk_method": "greedy"}
    of_lite = FILE | of_file | {"expert_weights_scale": 1.0}
    MODELS["deepseek2 lite"] = "deepseek2", "deepseek_v2", lite, of_lite | SPLIT | {"expert_gating_func": 1}
    MODELS["deepseek2 whole"] = "deepseek2", "deepseek_v2", lite | {"is_whole": True}, of_lite | WHOLE
    groups = {
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
    }
    of_groups = {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 16.0}
    large = WIDTHS | rope | groups | {"q_lora_rank": 96}
    MODELS["deepseek2"] = (
        "deepseek2", "deepseek_v2", large, of_lite | SPLIT | of_groups | {"attention.q_lora_rank": 96}
    )  # fmt: skip


def _v3() -> None:
    rope, of_file = _yarn(1.0)
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    of_groups = {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 2.5}
    scores = {"expert_gating_func": 2, "expert_weights_norm": True}
    MODELS["deepseek2 v3"] = (
        "deepseek2", "deepseek_v3", WIDTHS | rope | groups | {"q_lora_rank": 96},
        FILE | of_file | SPLIT | of_groups | scores | {"attention.q_lora_rank": 96},
    )  # fmt: skip
    MODELS["deepseek2 without yarn"] = (
        "deepseek2", "deepseek_v3",
        WIDTHS | {"q_lora_rank": None, "norm_topk_prob": True, "routed_scaling_factor": 1.8},
        FILE | SPLIT | scores | {"expert_weights_scale": 1.8},
    )  # fmt: skip


def _youtu() -> None:
    widths = {key: WIDTHS[key] for key in WIDTHS if "head" in key or "rank" in key}
    of_file = {"attention.kv_lora_rank": LATENT, "rope.dimension_count": TURNED, "attention.q_lora_rank": 96}
    dense = {"leading_dense_block_count": 2, "expert_feed_forward_length": 256, "expert_shared_count": 0}
    MODELS["youtu"] = (
        "deepseek2", "youtu", widths | {"q_lora_rank": 96, "tie_word_embeddings": True}, of_file | SPLIT | dense
    )  # fmt: skip


def _tensors(model: torch.nn.Module) -> dict[str, Stored]:
    found, keys = named_tensors(model, "deepseek2"), KEYS - TURNED
    for name in [name for name in found if "attn_kv_b" in name]:
        if not getattr(model.config, "is_whole", False):
            of_heads = found.pop(name).parameter.unflatten(0, (-1, keys + VALUES))
            found[name.replace("kv_b", "k_b")] = Stored(of_heads[:, :keys].mT)
            found[name.replace("kv_b", "v_b")] = Stored(of_heads[:, keys:])
    return found


_v2()
_v3()
_youtu()
TENSORS["deepseek2"] = _tensors
EXPANDED["deepseek2"] = {
    "it is computed of what is stored: it is expanded",
    "latent attention reads its weight as a matrix: it is expanded",
}
