"""Tiny models whose weights make errors visible, shared by the tests."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 128

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def scale_weights(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Matrices ~ N(0, 1 / fan_in), vectors near one. With the usual 0.02, attention is uniform and errors hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(1.0 + 0.1 * noise)
    return model.eval()


def tiny_llama(**overrides) -> PreTrainedModel:
    return scale_weights(LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **overrides})))


def tiny_qwen3(**overrides) -> PreTrainedModel:
    """With head_dim 32 != hidden / heads, and QK norms."""
    return scale_weights(Qwen3ForCausalLM(Qwen3Config(**{**_SHAPE, "head_dim": 32, **overrides})))


def tiny_mistral(window: int, **overrides) -> PreTrainedModel:
    return scale_weights(
        MistralForCausalLM(MistralConfig(**{**_SHAPE, "sliding_window": window, **overrides}))
    )
