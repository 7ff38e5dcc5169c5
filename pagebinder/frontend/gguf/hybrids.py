"""Models with Mamba layers and attention in GGUF files."""

from __future__ import annotations

from typing import Any

from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf.architecture import Architecture, Rule, paired
from pagebinder.frontend.gguf.options import Options, counts, heads_of_layers
from pagebinder.frontend.gguf.recurrent import (
    MAMBA,
    MAMBA_2,
    expansion,
    groups_of_mamba_2,
    has_bias,
    heads_of_mamba_2,
    inside,
    mamba,
    mamba_2,
)

# llama.cpp clamps no time step; that transformers starts one from the logarithm of the least keeps this above 0.
LEAST_STEP = 1e-30


def _mixer(options: Options) -> dict[str, Any]:
    """Sizes of Mamba 2, as most of its hybrids call them."""
    heads, width = heads_of_mamba_2(options)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_d_state": options.count("ssm.state_size"),
        "mamba_d_conv": options.count("ssm.conv_kernel"),
        "mamba_n_groups": groups_of_mamba_2(options),
        "mamba_conv_bias": has_bias(options, "ssm_conv1d"),
        "mamba_proj_bias": False,
    }


def _granite(options: Options) -> dict[str, Any]:
    """Granite 4, dense or a mixture; what scales it is said, or does not."""
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

    groups_of_mamba_2(options, GraniteMoeHybridRMSNormGated)
    heads, has_attention = heads_of_layers(options)
    has_experts = options.get("expert_count", 0) != 0
    count, used = counts(options) if has_experts else (0, 0)
    options.ignore("expert_used_count", "expert_shared_feed_forward_length")
    shared = "expert_shared_feed_forward_length" if has_experts else "feed_forward_length"
    return _mixer(options) | {
        "num_key_value_heads": heads,
        "layer_types": ["full_attention" if has else "linear_attention" for has in has_attention],
        "position_embedding_type": "rope" if options.get("rope.scaling.finetuned", True) else None,
        "attention_bias": has_bias(options, "attn_q"),
        "attention_multiplier": options.number("attention.scale", options.head_width() ** -0.5),
        "embedding_multiplier": options.number("embedding_scale", 1.0),
        "residual_multiplier": options.number("residual_scale", 1.0),
        "logits_scaling": options.number("logit_scale", 1.0),
        "mamba_expand": expansion(options),
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "shared_intermediate_size": options.count(shared),
    }


def _falcon_h1(options: Options) -> dict[str, Any]:
    """Its multipliers are in the weights of files."""
    return _mixer(options) | {
        "mamba_d_ssm": options.count("ssm.inner_size"),
        "mamba_rms_norm": bool(options.layers_with("ssm_norm.weight")),
        "mamba_norm_before_gate": False,
        "attention_bias": has_bias(options, "attn_q"),
        "mlp_bias": has_bias(options, "ffn_up"),
    }


def _nemotron_h(options: Options) -> dict[str, Any]:
    """Each layer is one of Mamba, attention (which has heads of keys and values) and feed-forward (a length)."""
    heads, has_attention = heads_of_layers(options)
    length, has_ffn = options.of_some_layers("feed_forward_length")
    ffn = "moe" if options.get("expert_count", 0) else "mlp"
    options.ignore("rope.dimension_count", "rope.freq_base")  # it has no positions
    epsilon = options.number("attention.layer_norm_epsilon")
    experts = _nemotron_experts(options, length) if ffn == "moe" else {"intermediate_size": length}
    return experts | {
        "num_key_value_heads": heads,
        "layers_block_type": [
            ffn if is_ffn else "full_attention" if is_attention else "linear_attention"
            for is_ffn, is_attention in zip(has_ffn, has_attention)
        ],
        "layer_norm_epsilon": options.number("attention.layer_norm_rms_epsilon", epsilon),
        "mamba_num_heads": heads_of_mamba_2(options)[0],
        "mamba_head_dim": heads_of_mamba_2(options)[1],
        "ssm_state_size": options.count("ssm.state_size"),
        "n_groups": groups_of_mamba_2(options),
        "conv_kernel": options.count("ssm.conv_kernel"),
        "use_conv_bias": has_bias(options, "ssm_conv1d"),
        "mlp_bias": has_bias(options, "ffn_up"),
        "time_step_min": LEAST_STEP,
    }


def _nemotron_experts(options: Options, length: int) -> dict[str, Any]:
    """Without a length of their own experts share the layer's."""
    count, used = counts(options)
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "n_shared_experts": options.count("expert_shared_count", 1),
        "moe_intermediate_size": options.count("expert_feed_forward_length", length // used),
        "moe_shared_expert_intermediate_size": options.count("expert_shared_feed_forward_length"),
        "moe_latent_size": options.count("moe_latent_size") if options.get("moe_latent_size") else None,
        "norm_topk_prob": bool(options.get("expert_weights_norm", False)),
        "routed_scaling_factor": options.number("expert_weights_scale", 1.0),
        "n_group": options.count("expert_group_count", 1),
        "topk_group": options.count("expert_group_used_count", 1),
    }


def _jamba(options: Options) -> dict[str, Any]:
    heads, has_attention = heads_of_layers(options)
    attention = [layer for layer, has in enumerate(has_attention) if has]
    experts = options.layers_with("ffn_gate_inp.weight")
    count, used = counts(options) if experts else (1, 1)
    options.ignore("expert_count", "expert_used_count")
    return {
        "num_key_value_heads": heads,
        "num_experts": count,
        "num_experts_per_tok": used,
        "mamba_expand": expansion(options),
        "mamba_d_state": options.count("ssm.state_size"),
        "mamba_d_conv": options.count("ssm.conv_kernel"),
        "mamba_dt_rank": options.count("ssm.time_step_rank"),
        "mamba_conv_bias": has_bias(options, "ssm_conv1d"),
        **_period(options, "attn", attention),
        **(_period(options, "expert", experts) if experts else {}),
    }


def _period(options: Options, kind: str, layers: list[int]) -> dict[str, Any]:
    """The config's words for layers of one kind, which come again and again.

    Raises:
        CheckpointError: they do not.
    """
    period = layers[1] - layers[0] if len(layers) > 1 else options.num_layers
    if layers != list(range(layers[0], options.num_layers, period)) or layers[0] >= period:
        raise CheckpointError(
            f"{options.file.path}: of {options.num_layers} layers {layers} are of the kind {kind}: no even distance."
        )
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": layers[0]}


ATTENTION = {
    "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj", "attn_output": "mixer.o_proj",
}  # fmt: skip
NEMOTRON = ATTENTION | inside("mixer", MAMBA_2) | {
    "attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj", "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias", "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mixer.experts.down_proj", "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj", "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
FEED_FORWARD = {
    "ffn_norm": "pre_ff_layernorm", "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}  # fmt: skip


def _nemotron_rules(config: Any) -> dict[str, Rule]:
    bare = ("exp_probs_b", "ffn_up_exps", "ffn_down_exps")
    return paired(config) | mamba_2(config) | dict.fromkeys(bare, Rule(is_bare=True))


_NEMOTRON_H = Architecture(
    model_type="nemotron_h", config=_nemotron_h, names=NEMOTRON, rules=_nemotron_rules, experts="mixer.experts",
    own=frozenset({"intermediate_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters"}),
    whole={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
)  # fmt: skip
ARCHITECTURES = {
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "granitehybrid": Architecture(
        model_type="granitemoehybrid", config=_granite, own=frozenset({"num_key_value_heads"}),
        names=inside("mamba", MAMBA_2) | {
            "ffn_gate": ("shared_mlp.input_linear", 0), "ffn_up": ("shared_mlp.input_linear", 1),
            "ffn_down": "shared_mlp.output_linear", "ffn_gate_shexp": ("shared_mlp.input_linear", 0),
            "ffn_up_shexp": ("shared_mlp.input_linear", 1), "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_gate_inp": "block_sparse_moe.router",
        },
        rules=lambda config: paired(config) | mamba_2(config), experts="block_sparse_moe.experts",
    ),
    "falcon-h1": Architecture(
        model_type="falcon_h1", config=_falcon_h1, rules=mamba_2,
        names=FEED_FORWARD | inside("mamba", MAMBA_2), whole={"output_norm": "model.final_layernorm"},
    ),
    "jamba": Architecture(
        model_type="jamba", config=_jamba, own=frozenset({"num_key_value_heads", "rope_parameters"}),
        names=FEED_FORWARD | inside("mamba", MAMBA) | {"ffn_gate_inp": "feed_forward.router"}, rules=mamba,
        experts="feed_forward.experts", whole={"output_norm": "model.final_layernorm"},
    ),
}  # fmt: skip
