"""Tiny DeepSeek-V4 models with all kinds of layers, and weights that make errors visible."""

from __future__ import annotations

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tests.helpers import VOCAB_SIZE, scale_weights

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
LAYERS = (SLIDING, CSA, HCA, CSA)
WINDOW, TOPK, HEAVY_RATIO = 12, 6, 16


def v4_config(**options) -> DeepseekV4Config:
    """Window 12, ratios 4 and 16, the best 6 entries; 16 index heads, so that no score is zero by chance of ReLU."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 80,  # 64 + 16 rotated: one block of the 8-bit layout
        "qk_rope_head_dim": 16,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": TOPK,
        "sliding_window": WINDOW,
        "layer_types": list(LAYERS),
        "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
        "compress_rates": {CSA: 4, HCA: HEAVY_RATIO},
        "hc_mult": 3,
        "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64,
                            "beta_fast": 32.0, "beta_slow": 1.0},
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    return DeepseekV4Config(**{**defaults, **options})


def v4_model(**options) -> DeepseekV4ForCausalLM:
    """Random, scaled weights: sinks, biases, hyper-connections and hash tables are no constants."""
    model = scale_weights(DeepseekV4ForCausalLM(v4_config(**options)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith(("sinks", "position_bias", "hc_base", ".base")):
                value.copy_(noise)
            elif name.endswith("e_score_correction_bias"):
                value.copy_(0.1 * noise)
            elif name.endswith("tid2eid"):
                # Each token's experts differ from one another, as in a trained table.
                experts = torch.rand(value.shape[0], model.config.n_routed_experts, generator=generator)
                value.copy_(experts.argsort(dim=1)[:, : value.shape[1]])
    return model.eval()
