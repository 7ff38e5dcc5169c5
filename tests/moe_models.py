"""Tiny mixtures of experts whose weights make errors visible."""

from __future__ import annotations

import torch
from transformers import (
    DbrxConfig,
    DbrxForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.helpers import VOCAB_SIZE, scale_weights

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8,
           "qk_nope_head_dim": 16, "v_head_dim": 12}  # fmt: skip


def _built(model_class, config_class, **options) -> PreTrainedModel:
    model = scale_weights(model_class(config_class(**{**_SHAPE, **options})))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)))
    return model


def tiny_mixtral(**overrides) -> PreTrainedModel:
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, **overrides}
    return _built(MixtralForCausalLM, MixtralConfig, **options)


def tiny_qwen3_moe(**overrides) -> PreTrainedModel:
    """A dense layer before the mixture, and weights that are normalised over the experts chosen."""
    options = {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 16}
    options |= {"mlp_only_layers": [0]}
    return _built(Qwen3MoeForCausalLM, Qwen3MoeConfig, **{**options, **overrides})


def tiny_gpt_oss_moe(**overrides) -> PreTrainedModel:
    """Biases, interleaved gates with a limit that is reached, windows and sinks."""
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16}
    options |= {"swiglu_limit": 1.0, "layer_types": ["sliding_attention", "full_attention"]}
    options |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return _built(GptOssForCausalLM, GptOssConfig, **{**options, **overrides})


def tiny_glm4_moe(**overrides) -> PreTrainedModel:
    """Sigmoid scores with a correction, the best groups first, a shared expert, a dense layer."""
    options = {**_GROUPED, "first_k_dense_replace": 1, "head_dim": 16}
    return _built(Glm4MoeForCausalLM, Glm4MoeConfig, **{**options, **overrides})


def tiny_deepseek_v3(**overrides) -> PreTrainedModel:
    """As GLM-4-MoE, and keys and values from latents."""
    options = {**_GROUPED, **_LATENT, "first_k_dense_replace": 1}
    return _built(DeepseekV3ForCausalLM, DeepseekV3Config, **{**options, **overrides})


def tiny_jetmoe(**overrides) -> PreTrainedModel:
    """Attention is a mixture, too: queries and output projections of each token's two experts."""
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}
    return _built(JetMoeForCausalLM, JetMoeConfig, **{**options, **overrides})


def tiny_llama4_moe(**overrides) -> PreTrainedModel:
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "attention_chunk_size": 16}
    options |= {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1}
    return _built(Llama4ForCausalLM, Llama4TextConfig, **{**options, **overrides})


def tiny_longcat_flash(**overrides) -> PreTrainedModel:
    """Two of the six experts return their input."""
    options = {**_LATENT, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3, "num_layers": 1}
    options |= {"expert_ffn_hidden_size": 24, "ffn_hidden_size": 48, "head_dim": 8}
    return _built(LongcatFlashForCausalLM, LongcatFlashConfig, **{**options, **overrides})


def tiny_dbrx(**overrides) -> PreTrainedModel:
    options = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "vocab_size": VOCAB_SIZE}
    options |= {"attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0}}
    options |= {
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}
    }
    return scale_weights(DbrxForCausalLM(DbrxConfig(**{**options, **overrides})))
