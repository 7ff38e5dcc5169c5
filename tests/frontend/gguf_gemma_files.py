"""GGUF files of tiny Gemma 3n and 4: models and tensors for gguf_files.py.

Layers that have the keys and values of others have tensors for their own, as released checkpoints do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tests.frontend.gguf_files import MODELS, READY, TENSORS, THETA, Stored

LOCAL, GLOBAL = "sliding_attention", "full_attention"
ROPES = {
    LOCAL: THETA,
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
GEMMA4 = {
    "num_hidden_layers": 3, "head_dim": 64, "global_head_dim": 128, "rope_parameters": ROPES, "sliding_window": 16,
    "layer_types": [LOCAL, LOCAL, GLOBAL], "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0,
}  # fmt: skip
EQUAL = GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
OF_GEMMA4 = {
    "attention.key_length": 128, "attention.value_length": 128, "attention.key_length_swa": 64,
    "attention.value_length_swa": 64, "rope.dimension_count": 128, "rope.dimension_count_swa": 64,
    "rope.freq_base": 1e6, "rope.freq_base_swa": 10_000.0, "attention.sliding_window": 16,
    "attention.sliding_window_pattern": [True, True, False], "final_logit_softcapping": 30.0,
    "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0,
}  # fmt: skip
OF_EQUAL = OF_GEMMA4 | {"attention.head_count_kv": [2, 2, 1]}
SHARED = {"num_hidden_layers": 4, "layer_types": [LOCAL, GLOBAL] * 2, "num_kv_shared_layers": 2}
OF_SHARED = {
    "attention.sliding_window_pattern": [True, False] * 2, "attention.shared_kv_layers": 2,
    "embedding_length_per_layer_input": 256,
}  # fmt: skip
PER_TOKEN = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 96}

MODELS |= {
    "gemma4": ("gemma4", "gemma4_text", EQUAL, OF_EQUAL),
    "gemma4 with experts": (
        "gemma4", "gemma4_text",
        EQUAL | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256},
        OF_EQUAL | {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256},
    ),
    "gemma4 with embeddings": ("gemma4", "gemma4_text", GEMMA4 | SHARED | PER_TOKEN, OF_GEMMA4 | OF_SHARED),
    "gemma4 twice as wide": (
        "gemma4", "gemma4_text", GEMMA4 | SHARED | PER_TOKEN | {"use_double_wide_mlp": True},
        OF_GEMMA4 | OF_SHARED | {"feed_forward_length": [256, 256, 512, 512]},
    ),
    "gemma3n": (
        "gemma3n", "gemma3n_text",
        SHARED | PER_TOKEN | {
            "head_dim": 64, "sliding_window": 16, "laurel_rank": 256, "altup_active_idx": 1,
            "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.0],
            "rope_parameters": {LOCAL: THETA, GLOBAL: THETA | {"rope_theta": 1e6}},
        },
        OF_SHARED | {
            "rope.freq_base": 1e6, "rope.freq_base_swa": 10_000.0, "attention.sliding_window": 16,
            "altup.num_inputs": 4, "altup.active_idx": 1, "final_logit_softcapping": 30.0,
            "activation_sparsity_scale": [1.6448535919189453, 0.8416213393211365, -np.inf, -np.inf],
        },
    ),
}  # fmt: skip

WHOLE = {
    "embed_tokens": "token_embd", "norm": "output_norm", "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj", "per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "router.proj": "ffn_gate_inp",
    "altup.correction_coefs": "altup_correct_coef", "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router", "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}  # fmt: skip
BARE = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight", "altup.correct_output_scale": "altup_correct_scale.weight",
}  # fmt: skip


def tensors(model: torch.nn.Module) -> dict[str, Stored]:
    found = {}
    for key, values in model.state_dict(keep_vars=True).items():
        if key == "lm_head.weight" or ".altup_" in key:
            continue
        if not key.startswith("model.layers."):
            change = _padded(values, model.config) if "embed_tokens" in key else None
            found[f"{WHOLE[key.split('.')[1]]}.weight"] = Stored(values, change=change)
            continue
        _, _, layer, part = key.split(".", 3)
        name = BARE.get(part) or f"{LAYER[part.removesuffix('.weight')]}.weight"
        found[f"blk.{layer}.{name}"] = Stored(values)
    return found | _unused(found, model.config)


def _padded(values: torch.Tensor, config) -> Callable[[np.ndarray], np.ndarray] | None:
    """The converter of Gemma 3n gives a table a row for each token."""
    missing = config.vocab_size - len(values)
    return (lambda rows: np.pad(rows, ((0, missing), (0, 0)))) if missing > 0 else None


def _unused(found: dict[str, Stored], config) -> dict[str, Stored]:
    own = config.num_hidden_layers - config.num_kv_shared_layers
    parts, more = ("attn_k", "attn_v", "attn_k_norm"), {}
    for layer in range(own, config.num_hidden_layers):
        for part in parts:
            like = found[f"blk.{layer - own}.{part}.weight"].parameter
            more[f"blk.{layer}.{part}.weight"] = Stored(torch.randn_like(like))
    return more


def tensors_of_gemma3n(model: torch.nn.Module) -> dict[str, Stored]:
    stacks = {
        "altup_proj": model.model.altup_projections,
        "altup_unembd_proj": model.model.altup_unembed_projections,
    }
    return tensors(model) | {
        f"{name}.weight": Stored(torch.stack([layer.weight for layer in stack]))
        for name, stack in stacks.items()
    }


def tensors_of_gemma4(model: torch.nn.Module) -> dict[str, Stored]:
    factors = torch.tensor([1.0] * 16 + [1e30] * 48)  # a quarter of a head of 128 is turned
    return tensors(model) | {"rope_freqs.weight": Stored(factors)}


def ready(model: torch.nn.Module) -> None:
    """Scores of attention are of about 1, and every factor matters."""
    for name, values in model.state_dict(keep_vars=True).items():
        if name.endswith("q_norm.weight"):
            values.mul_(0.15)
        elif name.endswith(("layer_scalar", ".scale", "per_expert_scale", "correct_output_scale")):
            values.uniform_(0.5, 1.5)


TENSORS |= {"gemma3n": tensors_of_gemma3n, "gemma4": tensors_of_gemma4}
READY |= {"gemma3n": ready, "gemma4": ready}
