"""Tiny models with recurrent layers of every family's own kind, some beside attention, for the engine's tests."""

from __future__ import annotations

import torch
import transformers

from tests.helpers import VOCAB_SIZE, scale_weights

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}  # fmt: skip


def _built(name: str, **options) -> torch.nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**_SHAPE, **options})
    return forgetting_slowly(getattr(transformers, f"{name}ForCausalLM")(config))


def forgetting_slowly(model: torch.nn.Module) -> torch.nn.Module:
    """Scaled weights; decays near 1: otherwise a wrong state is forgotten before it shows."""
    scale_weights(model)
    lowered = {"A_log": 4.0, "dt_bias": 1.0, "dt_proj.bias": 2.0, "dt_proj_bias": 2.0, "recurrent_param": 5.0,
               "time_decay": 5.0}  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for suffix, amount in lowered.items():
                if name.endswith(suffix):
                    parameter.sub_(amount)
    return model


def bamba():
    return _built("Bamba", num_hidden_layers=3, attn_layer_indices=[1], **_MAMBA2)


def falcon_h1():
    """Attention and Mamba-2 side by side in each layer, with multipliers."""
    return _built("FalconH1", num_hidden_layers=2, mamba_d_ssm=64, ssm_in_multiplier=0.7, **_MAMBA2)


def nemotron_h():
    """Layers that are a mixer, an attention or an MLP."""
    options = {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
    }
    return _built("NemotronH", hybrid_override_pattern="M-*M", head_dim=8, **options)


def jamba():
    """Mamba-1 with norms of B, C and dt, beside attention without positions; dense."""
    return _built("Jamba", num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1, num_experts=1,
                  mamba_d_state=4, mamba_dt_rank=4)  # fmt: skip


def zamba2():
    """One attention block, used at two depths, in front of a Mamba-2 mixer each time."""
    types = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
    return _built("Zamba2", layers_block_type=types, num_hidden_layers=4, n_mamba_heads=4, mamba_ngroups=2,
                  mamba_d_state=8, chunk_size=16, num_mem_blocks=1, use_shared_attention_adapter=True,
                  adapter_rank=4, num_key_value_heads=4)  # fmt: skip


def recurrent_gemma():
    """RG-LRU, and attention in a window."""
    return _built("RecurrentGemma", num_hidden_layers=3, lru_width=32, attention_window_size=16, head_dim=8)


def mamba():
    return _built("Mamba", num_hidden_layers=2, state_size=4)


def rwkv():
    """Weights are rescaled from the second layer on."""
    return _built("Rwkv", num_hidden_layers=3, context_length=512, rescale_every=1)


def xlstm():
    return _built("xLSTM", num_hidden_layers=2, num_blocks=2, embedding_dim=32, num_heads=4, chunk_size=16,
                  qk_dim_factor=0.5, v_dim_factor=1.0)  # fmt: skip


def minimax():
    """Lightning attention, and attention over all tokens; one expert."""
    return _built("MiniMax", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], block_size=16,
                  num_local_experts=2, num_experts_per_tok=1, head_dim=8, sliding_window=None)  # fmt: skip


def falcon_mamba():
    return _built("FalconMamba", num_hidden_layers=2, state_size=4)


def zamba():
    """Mamba-1 mixers of two heads; a shared attention block in front of two of them."""
    types = ["linear_attention", "hybrid", "hybrid"]
    return _built("Zamba", num_hidden_layers=3, layers_block_type=types, n_mamba_heads=2, mamba_d_state=4,
                  mamba_dt_rank=4, num_key_value_heads=4)  # fmt: skip


def kimi_linear():
    """Delta attention with a decay per channel, and latent attention without positions; dense MLPs."""
    ranks = {
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
    return _built("KimiLinear", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
                  mlp_layer_types=["dense"] * 2, linear_num_heads=4, linear_head_dim=8, num_key_value_heads=4,
                  **ranks)  # fmt: skip
