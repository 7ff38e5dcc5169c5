"""Mixtures of experts for gguf_files.py: with an expert of all tokens, layers without any, or corrected scores."""

from __future__ import annotations

import torch

from tests.frontend.gguf_files import EXPANDED, HEAD, LLAMA3, MODELS, TENSORS, THETA, Stored, named_tensors

ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
EXPERTS = {"expert_count": 8, "expert_used_count": 3}
FILE = EXPERTS | {
    "expert_feed_forward_length": 64, "expert_shared_count": 2, "leading_dense_block_count": 1,
    "expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5,
    "expert_gating_func": 2,
}  # fmt: skip
HALF = {"rope_parameters": THETA | {"partial_rotary_factor": 0.5}}
CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}


def _as_deepseek() -> None:
    glm = HEAD | ROUTED | HALF | {"pad_token_id": 0}
    of_glm = FILE | {"rope.dimension_count": 32}
    MODELS["glm4moe"] = "glm4moe", "glm4_moe", glm | {"attention_bias": True, "use_qk_norm": True}, of_glm
    MODELS["glm4moe air"] = "glm4moe", "glm4_moe", glm, of_glm | {"expert_gating_func": None}
    MODELS["dots1"] = "dots1", "dots1", HEAD | ROUTED | {"sliding_window": None}, FILE
    windows = {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 4}
    MODELS["exaone-moe"] = (
        "exaone-moe", "exaone_moe",
        HEAD | ROUTED | windows | {"num_experts": 8, "num_shared_experts": 2},
        FILE | {
            "attention.sliding_window": 16, "attention.sliding_window_pattern": [True, True, True, False],
            "expert_shared_feed_forward_length": 128,
        },
    )  # fmt: skip


def _others() -> None:
    ernie = {
        "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 64, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_interval": 1,
    }  # fmt: skip
    of_ernie = EXPERTS | {
        "expert_feed_forward_length": 64, "expert_shared_count": 2, "leading_dense_block_count": 1,
        "interleave_moe_layer_step": 1,
    }  # fmt: skip
    MODELS["ernie4_5-moe"] = "ernie4_5-moe", "ernie4_5_moe", HEAD | ernie, of_ernie
    MODELS["ernie4_5-moe alone"] = (
        "ernie4_5-moe", "ernie4_5_moe",
        HEAD | ernie | {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "num_hidden_layers": 4},
        of_ernie | {"expert_shared_count": 0, "interleave_moe_layer_step": 2},
    )  # fmt: skip
    MODELS["lfm2moe"] = (
        "lfm2moe", "lfm2_moe",
        CONV | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "num_dense_layers": 1},
        EXPERTS | {
            "attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "expert_feed_forward_length": 64,
            "leading_dense_block_count": 1, "expert_gating_func": 2,
        },
    )  # fmt: skip
    MODELS["hunyuan-moe"] = (
        "hunyuan-moe", "hunyuan_v1_moe", HEAD | {"num_experts": 8, "moe_topk": 3},
        EXPERTS | {
            "expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 256, "expert_shared_count": 1,
            "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 128,
        },
    )  # fmt: skip
    MODELS["minimax-m2"] = (
        "minimax-m2", "minimax_m2", HEAD | HALF | {"num_local_experts": 8, "num_experts_per_tok": 3},
        EXPERTS | {"expert_feed_forward_length": 256, "expert_gating_func": 2, "rope.dimension_count": 32},
    )  # fmt: skip


def _llama4() -> None:
    sizes = {
        "intermediate_size": 64, "intermediate_size_mlp": 512, "num_hidden_layers": 4, "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
    }  # fmt: skip
    of_file = {"feed_forward_length": 512, "expert_used_count": 1, "expert_feed_forward_length": 64}
    MODELS["llama4"] = (
        "llama4", "llama4_text", HEAD | sizes | {"num_local_experts": 8, "rope_parameters": LLAMA3},
        of_file | {"expert_count": 8, "interleave_moe_layer_step": 1},
    )  # fmt: skip
    MODELS["llama4 large"] = (
        "llama4", "llama4_text",
        HEAD | sizes | {"num_local_experts": 128, "interleave_moe_layer_step": 4, "use_qk_norm": False},
        of_file | {"expert_count": 128, "interleave_moe_layer_step": 4},
    )  # fmt: skip


def _llama4_tensors(model: torch.nn.Module) -> dict[str, Stored]:
    """Its experts have matrices [K, N], of gates and ups side by side."""
    found = named_tensors(model, "llama4")
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            layer, rows = name.split(".")[2], parameter.mT
            parts = {"down": rows}
            if "gate_up" in name:
                parts = dict(zip(("gate", "up"), rows.chunk(2, dim=1)))
            found |= {f"blk.{layer}.ffn_{part}_exps.weight": Stored(values) for part, values in parts.items()}
    return found


_as_deepseek()
_others()
_llama4()
TENSORS["llama4"] = _llama4_tensors
EXPANDED["llama4"] = {
    "they are stored in Q4_K, Q5_K, Q8_0, for which experts have no kernel: they are expanded",
    "it is a Llama4Router: its weight is expanded",
}
