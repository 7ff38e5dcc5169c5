"""Models without experts in GGUF files, but for Mixtral, whose files say that they are Llama's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagebinder.frontend.gguf.architecture import Architecture, paired
from pagebinder.frontend.gguf.options import (
    FREQUENCIES,
    Options,
    alternating,
    biases,
    counts,
    heads_of_layers,
    ignore_images,
    rope_of,
)

BEHIND_HALVES = {  # norms behind each half of a layer alone
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LFM2_WHOLE = {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}
LFM2_NAMES = {
    "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip


def _llama(options: Options) -> dict[str, Any]:
    if options.get("expert_count"):
        count, used = counts(options)
        return {"num_local_experts": count, "num_experts_per_tok": used}
    options.get("expert_used_count")
    return biases(options)


def granite(options: Options) -> dict[str, Any]:
    if options.get("rope.scaling.finetuned") is False:  # which says there: no positions
        options.refuse("rope.scaling.finetuned")
    return biases(options) | {
        "attention_multiplier": options.number("attention.scale"),
        "embedding_multiplier": options.number("embedding_scale", 1.0),
        "residual_multiplier": options.number("residual_scale", 1.0),
        "logits_scaling": options.number("logit_scale"),
    }


def _granite_4(options: Options) -> dict[str, Any]:
    """Files of those of its models that have neither experts nor Mamba layers say sizes of both."""
    if options.get("expert_count", 0) != 0:
        options.refuse("expert_count")
    options.ignore("expert_used_count", "expert_shared_feed_forward_length", "ssm.time_step_rank")
    options.ignore("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size")
    return granite(options)


def _qwen2(options: Options) -> dict[str, Any]:
    return {"use_sliding_window": False}


def qwen3(options: Options) -> dict[str, Any]:
    return biases(options) | {"use_sliding_window": False}


def of_text(config: Callable[[Options], dict[str, Any]]) -> Callable[[Options], dict[str, Any]]:
    """The same model in a file of one that sees images, too."""

    def read(options: Options) -> dict[str, Any]:
        ignore_images(options)
        return config(options)

    return read


def _phi3(options: Options) -> dict[str, Any]:
    original = options.count("rope.scaling.original_context_length", options.count("context_length"))
    return {
        "sliding_window": options.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


def _exaone4(options: Options) -> dict[str, Any]:
    """Windows in three of four layers, and positions in these alone; or neither."""
    window = options.get("attention.sliding_window")
    layers = alternating(options, 4) if window else ["full_attention"] * options.num_layers
    return {
        "sliding_window": window and options.count("attention.sliding_window"),
        "sliding_window_pattern": None,
        "layer_types": layers,
    }


def lfm2_layers(options: Options) -> dict[str, Any]:
    heads, has_attention = heads_of_layers(options)
    return {
        "num_key_value_heads": heads,
        "norm_eps": options.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": options.count("shortconv.l_cache"),
        "layer_types": ["full_attention" if has else "conv" for has in has_attention],
    }


def _smollm3(options: Options) -> dict[str, Any]:
    turns = [
        int((layer + 1) % 4 != 0) for layer in range(options.num_layers)
    ]  # every fourth has no positions
    return biases(options) | {"no_rope_layers": turns, "use_sliding_window": False}


def _olmo2(options: Options) -> dict[str, Any]:
    """Files of OLMo 3 say it of themselves, too: windows, and RoPE that is scaled in layers without them alone."""
    if not options.get("attention.sliding_window"):
        return biases(options)
    rope = rope_of(options, options.head_width())
    theta = options.number("rope.freq_base_swa", rope["rope_theta"])
    return biases(options) | {
        "sliding_window": options.count("attention.sliding_window"),
        "layer_types": alternating(options, 4),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _minicpm(options: Options) -> dict[str, Any]:
    """Granite's multipliers, and the usual one of scores; old files leave out those of MiniCPM 2B."""
    return biases(options) | {
        "attention_multiplier": options.head_width() ** -0.5,
        "embedding_multiplier": options.number("embedding_scale", 12.0),
        "residual_multiplier": options.number("residual_scale", 1.4 * options.num_layers**-0.5),
        "logits_scaling": options.number("logit_scale", options.count("embedding_length") / 256),
    }


def _mistral3(options: Options) -> dict[str, Any]:
    """Queries far from the beginning are longer, of Ministral 3; YaRN has a factor of attention of its own."""
    rope = rope_of(options, options.head_width())
    if options.get("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": 1.0, "mscale_all_dim": options.number("rope.scaling.yarn_log_multiplier")}
    if options.get("attention.temperature_scale"):
        if rope["rope_type"] != "yarn":
            options.refuse("attention.temperature_scale")
        rope |= {"llama_4_scaling_beta": options.number("attention.temperature_scale")}
    return {"rope_parameters": rope, "sliding_window": None}


ARCHITECTURES = {
    "llama": Architecture(
        model_type=lambda options: "mixtral" if options.get("expert_count") else "llama",
        config=_llama,
        rules=paired,
        frequencies=FREQUENCIES[:1],
    ),
    "qwen2": Architecture(model_type="qwen2", config=_qwen2),
    "qwen2vl": Architecture(model_type="qwen2", config=of_text(_qwen2)),
    "qwen3": Architecture(model_type="qwen3", config=qwen3),
    "qwen3vl": Architecture(model_type="qwen3", config=of_text(qwen3)),
    "phi3": Architecture(
        model_type="phi3", config=_phi3, names={"ffn_up": "mlp.gate_up_proj"}, frequencies=FREQUENCIES[1:],
        turns_parts=True,
    ),
    "granite": Architecture(model_type="granite", config=_granite_4, rules=paired),
    "seed_oss": Architecture(
        model_type="seed_oss",
        config=lambda o: biases(o) | {"attention_out_bias": o.has("blk.0.attn_output.bias")},
        names={"post_attention_norm": "post_attention_layernorm"},
    ),
    "ernie4_5": Architecture(
        model_type="ernie4_5", config=lambda options: {"use_bias": options.has("blk.0.attn_q.bias")}
    ),
    "hunyuan-dense": Architecture(
        model_type="hunyuan_v1_dense", config=biases,
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "exaone4": Architecture(
        model_type="exaone4", config=_exaone4, names=BEHIND_HALVES, frequencies=FREQUENCIES[:1]
    ),
    "glm4": Architecture(
        model_type="glm4", config=biases, turns_parts=True,
        names={
            "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "arcee": Architecture(model_type="arcee", config=biases, rules=paired, frequencies=FREQUENCIES[:1]),
    "lfm2": Architecture(
        model_type="lfm2", config=lambda o: lfm2_layers(o) | {"block_auto_adjust_ff_dim": False},
        own=frozenset({"num_key_value_heads"}),
        whole=LFM2_WHOLE, names=LFM2_NAMES,
    ),
    "mistral3": Architecture(
        model_type=lambda options: "ministral3" if options.get("attention.temperature_scale") else "mistral",
        config=_mistral3, rules=paired, own=frozenset({"rope_parameters"}),
    ),
    "olmo2": Architecture(
        model_type=lambda options: "olmo3" if options.get("attention.sliding_window") else "olmo2",
        config=_olmo2, names=BEHIND_HALVES,
    ),
    "internlm2": Architecture(model_type="llama", config=biases, rules=paired),
    "minicpm": Architecture(
        model_type="granite", config=_minicpm, rules=paired, frequencies=FREQUENCIES[1:]
    ),
    "exaone": Architecture(model_type="llama", config=biases, frequencies=FREQUENCIES[:1]),
    "smollm3": Architecture(model_type="smollm3", config=_smollm3, rules=paired),
}  # fmt: skip
