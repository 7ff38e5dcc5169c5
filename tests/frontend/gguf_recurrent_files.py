"""GGUF files of tiny models with Mamba layers."""

from __future__ import annotations

import numpy as np
import torch

from tests.frontend.gguf_files import MODELS, TENSORS, Stored, pairs

SCALES = {
    "attention_multiplier": 0.02, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip
SCALES_OF_FILE = {
    "attention.scale": 0.02, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0,
}  # fmt: skip
MAMBA_2 = {"mamba_n_heads": 32, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
MAMBA_2_OF_FILE = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 16, "ssm.time_step_rank": 32, "ssm.group_count": 1,
}  # fmt: skip
TWO_GROUPS = {"ssm.group_count": 2}
MAMBA_OF_FILE = {"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 16, "ssm.time_step_rank": 256}
NO_ATTENTION = {
    "feed_forward_length": 0, "attention.head_count": 0, "attention.head_count_kv": None,
    "attention.key_length": None, "attention.value_length": None, "rope.freq_base": None,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": None}
DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 256}
EXPERTS_OF_FILE = {"expert_count": 4, "expert_used_count": 2, "expert_shared_feed_forward_length": 512}
NEMOTRON = {
    "head_dim": 64, "mamba_num_heads": 32, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
    "rope_parameters": None, "time_step_min": 1e-30,
}  # fmt: skip
NEMOTRON_OF_FILE = MAMBA_2_OF_FILE | TWO_GROUPS | {
    "attention.head_count_kv": [0, 0, 2], "attention.layer_norm_rms_epsilon": None,
    "attention.layer_norm_epsilon": 1e-5, "rope.scaling.finetuned": False, "rope.dimension_count": 64,
}  # fmt: skip

MODELS |= {
    "granitehybrid": (
        "granitehybrid", "granitemoehybrid", MAMBA_2 | SCALES | HYBRID | DENSE,
        MAMBA_2_OF_FILE | SCALES_OF_FILE | {
            "attention.head_count_kv": [0, 2], "rope.scaling.finetuned": False, "expert_count": 0,
            "expert_used_count": 0, "expert_shared_feed_forward_length": 256,
        },
    ),
    "granitehybrid with positions": (
        "granitehybrid", "granitemoehybrid",
        MAMBA_2 | HYBRID | DENSE | {"position_embedding_type": "rope", "attention_multiplier": 0.125},
        MAMBA_2_OF_FILE | {"attention.head_count_kv": [0, 2]},
    ),
    "granitehybrid of experts": (
        "granitehybrid", "granitemoehybrid",
        MAMBA_2 | SCALES | HYBRID | {
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 512,
            "tie_word_embeddings": True,
        },
        MAMBA_2_OF_FILE | SCALES_OF_FILE | EXPERTS_OF_FILE | {
            "attention.head_count_kv": [0, 2], "rope.scaling.finetuned": False,
        },
    ),
    "falcon-h1": (
        "falcon-h1", "falcon_h1",
        MAMBA_2 | {"head_dim": 64, "mamba_d_ssm": 512, "mamba_rms_norm": False}, MAMBA_2_OF_FILE,
    ),
    "falcon-h1 with norms": (
        "falcon-h1", "falcon_h1",
        MAMBA_2 | {
            "head_dim": 64, "mamba_d_ssm": 512, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
        },
        MAMBA_2_OF_FILE | TWO_GROUPS,
    ),
    "nemotron_h": (
        "nemotron_h", "nemotron_h", NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
        NEMOTRON_OF_FILE | {"feed_forward_length": [0, 256, 0], "block_count": 3},
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe", "nemotron_h",
        NEMOTRON | {
            "layers_block_type": ["linear_attention", "moe", "full_attention"], "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 256,
            "moe_latent_size": 256, "routed_scaling_factor": 2.5,
        },
        NEMOTRON_OF_FILE | {
            "feed_forward_length": [0, 512, 0], "block_count": 3, "expert_count": 4, "expert_used_count": 2,
            "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 256, "expert_shared_count": 1,
            "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 1,
            "expert_group_used_count": 1, "moe_latent_size": 256,
        },
    ),
    "mamba2": (
        "mamba2", "mamba2",
        {"num_heads": 32, "head_dim": 16, "state_size": 16, "n_groups": 1, "rope_parameters": None},
        MAMBA_2_OF_FILE | NO_ATTENTION,
    ),
    "mamba": (
        "mamba", "mamba",
        {"intermediate_size": 512, "state_size": 16, "time_step_rank": 256, "rope_parameters": None},
        MAMBA_OF_FILE | NO_ATTENTION | {"ssm.dt_b_c_rms": False},
    ),
    "falcon_mamba": (
        "mamba", "falcon_mamba",
        {
            "intermediate_size": 512, "state_size": 16, "time_step_rank": 256, "mixer_rms_eps": 1e-5,
            "rope_parameters": None,
        },
        MAMBA_OF_FILE | NO_ATTENTION | {"ssm.dt_b_c_rms": True},
    ),
    "jamba": (
        "jamba", "jamba",
        {
            "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
            "expert_layer_offset": 0, "num_experts": 4, "num_experts_per_tok": 2, "mamba_dt_rank": 256,
            "rope_parameters": None,
        },
        MAMBA_OF_FILE | {
            "attention.head_count_kv": [0, 2, 0], "expert_count": 4, "expert_used_count": 2, "rope.freq_base": None,
            "attention.key_length": None, "attention.value_length": None,
        },
    ),
}  # fmt: skip


def _weights(layer: str, **modules) -> dict[str, Stored]:
    """Part of a name -> a module's weight and bias."""
    found = {}
    for part, module in modules.items():
        found[f"{layer}.{part}.weight"] = Stored(module.weight)
        if getattr(module, "bias", None) is not None:
            found[f"{layer}.{part}.bias"] = Stored(module.bias)
    return found


def _mixer(layer: str, mixer) -> dict[str, Stored]:
    """What both kinds of Mamba have."""
    return _weights(layer, ssm_in=mixer.in_proj, ssm_out=mixer.out_proj) | {
        f"{layer}.ssm_conv1d.weight": Stored(mixer.conv1d.weight, change=lambda values: values.squeeze(1)),
        f"{layer}.ssm_conv1d.bias": Stored(mixer.conv1d.bias),
    }


def mamba(layer: str, mixer) -> dict[str, Stored]:
    """A's state sizes are columns, D has no second dimension."""
    norms = {part: getattr(mixer, f"{part}_layernorm", None) for part in ("dt", "b", "c")}
    with_weights = {f"ssm_{part}_norm": norm for part, norm in norms.items() if norm and [*norm.parameters()]}
    return _mixer(layer, mixer) | _weights(layer, ssm_x=mixer.x_proj, ssm_dt=mixer.dt_proj, **with_weights) | {
        f"{layer}.ssm_a": Stored(mixer.A_log, change=lambda values: -np.exp(values)),
        f"{layer}.ssm_d": Stored(mixer.D),
    }  # fmt: skip


def mamba_2(layer: str, mixer) -> dict[str, Stored]:
    """A and D are columns, the weights of norms lie by groups."""
    found = _mixer(layer, mixer) | {
        f"{layer}.ssm_dt.bias": Stored(mixer.dt_bias),
        f"{layer}.ssm_a": Stored(mixer.A_log, change=lambda values: -np.exp(values)[:, None]),
        f"{layer}.ssm_d": Stored(mixer.D, change=lambda values: values[:, None]),
    }
    if hasattr(mixer.norm, "weight"):
        by_groups = Stored(mixer.norm.weight, change=lambda values: values.reshape(mixer.n_groups, -1))
        found[f"{layer}.ssm_norm.weight"] = by_groups
    return found


def _attention(layer: str, attention, paired: bool = True) -> dict[str, Stored]:
    found = _weights(
        layer, attn_q=attention.q_proj, attn_k=attention.k_proj, attn_v=attention.v_proj, attn_output=attention.o_proj
    )  # fmt: skip
    for part in ("attn_q", "attn_k") if paired else ():
        weight = found[f"{layer}.{part}.weight"].parameter
        found[f"{layer}.{part}.weight"] = Stored(
            weight, pairs(len(weight), len(weight) // attention.head_dim)
        )
    return found


def _experts(layer: str, experts) -> dict[str, Stored]:
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    named = {"gate": gate, "up": up, "down": experts.down_proj}
    return {f"{layer}.ffn_{part}_exps.weight": Stored(values) for part, values in named.items()}


def _halves(layer: str, joined, gate: str, up: str) -> dict[str, Stored]:
    """Gates lie on top of ups in one weight."""
    parts = zip((gate, up), joined.weight.chunk(2))
    return {f"{layer}.{part}.weight": Stored(values) for part, values in parts}


def _whole(model, table, norm) -> dict[str, Stored]:
    found = {"token_embd.weight": Stored(table.weight)}
    if norm is not None:
        found["output_norm.weight"] = Stored(norm.weight)
    if model.lm_head.weight is not table.weight:
        found["output.weight"] = Stored(model.lm_head.weight)
    return found


def _granite(model) -> dict[str, Stored]:
    found = _whole(model, model.model.embed_tokens, model.model.norm)
    for number, layer in enumerate(model.model.layers):
        name, shared, moe = f"blk.{number}", layer.shared_mlp, layer.block_sparse_moe
        ending = "" if moe is None else "_shexp"
        found |= mamba_2(name, layer.mamba) if layer.mamba is not None else _attention(name, layer.self_attn)
        found |= _halves(name, shared.input_linear, f"ffn_gate{ending}", f"ffn_up{ending}")
        found |= _weights(name, attn_norm=layer.input_layernorm, ffn_norm=layer.post_attention_layernorm)
        found |= _weights(name, **{f"ffn_down{ending}": shared.output_linear})
        if moe is not None:
            found |= _weights(name, ffn_gate_inp=moe.router) | _experts(name, moe.experts)
    return found


def _falcon_h1(model) -> dict[str, Stored]:
    found = _whole(model, model.model.embed_tokens, model.model.final_layernorm)
    for number, layer in enumerate(model.model.layers):
        name, ffn = f"blk.{number}", layer.feed_forward
        found |= mamba_2(name, layer.mamba) | _attention(name, layer.self_attn, paired=False)
        found |= _weights(name, attn_norm=layer.input_layernorm, ffn_gate=ffn.gate_proj)
        found |= _weights(name, ffn_up=ffn.up_proj, ffn_down=ffn.down_proj)
        found[f"{name}.ffn_norm"] = Stored(layer.pre_ff_layernorm.weight)
    return found


def _nemotron_h(model) -> dict[str, Stored]:
    found = _whole(model, model.model.embeddings, model.model.norm_f)
    for number, layer in enumerate(model.model.layers):
        name, mixer = f"blk.{number}", layer.mixer
        found |= _weights(name, attn_norm=layer.norm)
        if layer.block_type == "linear_attention":
            found |= mamba_2(name, mixer)
        elif layer.block_type == "full_attention":
            found |= _attention(name, mixer)
        elif layer.block_type == "mlp":
            found |= _weights(name, ffn_up=mixer.up_proj, ffn_down=mixer.down_proj)
        else:
            found |= _nemotron_experts(name, mixer)
    return found


def _nemotron_experts(layer: str, moe) -> dict[str, Stored]:
    latent = {"ffn_latent_down": moe.fc1_latent_proj, "ffn_latent_up": moe.fc2_latent_proj}
    latent = {part: module for part, module in latent.items() if isinstance(module, torch.nn.Linear)}
    shared = moe.shared_experts
    return _weights(layer, ffn_up_shexp=shared.up_proj, ffn_down_shexp=shared.down_proj, **latent) | {
        f"{layer}.ffn_up_exps.weight": Stored(moe.experts.up_proj),
        f"{layer}.ffn_down_exps.weight": Stored(moe.experts.down_proj),
        f"{layer}.ffn_gate_inp.weight": Stored(moe.gate.weight),
        f"{layer}.exp_probs_b.bias": Stored(moe.gate.e_score_correction_bias),
    }


def _mamba_alone(model) -> dict[str, Stored]:
    found = _whole(model, model.backbone.embeddings, model.backbone.norm_f)
    of_mixer = mamba_2 if model.config.model_type == "mamba2" else mamba
    for number, layer in enumerate(model.backbone.layers):
        found |= of_mixer(f"blk.{number}", layer.mixer) | _weights(f"blk.{number}", attn_norm=layer.norm)
    return found


def _jamba(model) -> dict[str, Stored]:
    found = _whole(model, model.model.embed_tokens, model.model.final_layernorm)
    for number, layer in enumerate(model.model.layers):
        name, ffn = f"blk.{number}", layer.feed_forward
        found |= _weights(name, attn_norm=layer.input_layernorm, ffn_norm=layer.pre_ff_layernorm)
        if hasattr(layer, "mamba"):
            found |= mamba(name, layer.mamba)
        else:
            found |= _attention(name, layer.self_attn, paired=False)
        if hasattr(ffn, "experts"):
            found |= _weights(name, ffn_gate_inp=ffn.router) | _experts(name, ffn.experts)
        else:
            found |= _weights(name, ffn_gate=ffn.gate_proj, ffn_up=ffn.up_proj, ffn_down=ffn.down_proj)
    return found


TENSORS |= {
    "granitehybrid": _granite,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "mamba2": _mamba_alone,
    "mamba": _mamba_alone,
    "jamba": _jamba,
}
