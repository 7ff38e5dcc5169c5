"""Models with LayerNorm in GGUF files: Command R, StarCoder 2, Phi 2, StableLM, Nemotron, GPT-NeoX."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagebinder.frontend.gguf.architecture import Architecture, Order, Rule
from pagebinder.frontend.gguf.options import Options, alternating, biases

OWN = frozenset({"rms_norm_eps"})


def _epsilon(options: Options) -> float:
    return options.number("attention.layer_norm_epsilon")


def _cohere(options: Options) -> dict[str, Any]:
    return {"layer_norm_eps": _epsilon(options), "logit_scale": options.number("logit_scale")}


def _command_r(options: Options) -> dict[str, Any]:
    return _cohere(options) | {"use_qk_norm": options.has("blk.0.attn_q_norm.weight")}


def _cohere2(options: Options) -> dict[str, Any]:
    """Positions in layers with windows alone."""
    return _cohere(options) | {
        "sliding_window": options.count("attention.sliding_window"),
        "layer_types": alternating(options, 4),
    }


def _starcoder2(options: Options) -> dict[str, Any]:
    """llama.cpp has no window here, whatever the model's config says."""
    return {
        "norm_epsilon": _epsilon(options),
        "use_bias": True,
        "sliding_window": None,
    }


def _stablelm(options: Options) -> dict[str, Any]:
    """Attention and MLP of a layer are side by side where the second has no norm of its own."""
    options.ignore("use_parallel_residual")
    return {
        "layer_norm_eps": _epsilon(options),
        "use_qkv_bias": options.has("blk.0.attn_q.bias"),
        "use_parallel_residual": not options.has("blk.0.ffn_norm.weight"),
    }


def _nemotron(options: Options) -> dict[str, Any]:
    options.ignore("attention.layer_norm_rms_epsilon")  # it is said, too
    return biases(options) | {"norm_eps": _epsilon(options)}


def _gpt_neox(options: Options) -> dict[str, Any]:
    side_by_side = options.get("use_parallel_residual", True)
    if type(side_by_side) is not bool:
        options.refuse("use_parallel_residual")
    return {
        "layer_norm_eps": _epsilon(options),
        "use_parallel_residual": side_by_side,
    }


def _by_head(num_heads: int) -> Order:
    """Queries, keys and values of a head next to each other, where files have those of all heads."""
    return lambda rows: np.arange(rows).reshape(3, num_heads, -1).swapaxes(0, 1).reshape(-1)


ARCHITECTURES = {
    "command-r": Architecture(model_type="cohere", config=_command_r, own=OWN),
    "cohere2": Architecture(model_type="cohere2", config=_cohere2, own=OWN),
    "starcoder2": Architecture(
        model_type="starcoder2", config=_starcoder2, own=OWN,
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, no_biases=(),
    ),
    "phi2": Architecture(
        model_type="phi", config=lambda o: {"layer_norm_eps": _epsilon(o)}, own=OWN, turns_parts=True,
        whole={"output_norm": "model.final_layernorm"},
        names={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    ),
    "stablelm": Architecture(model_type="stablelm", config=_stablelm, own=OWN, turns_parts=True),
    "nemotron": Architecture(
        model_type="nemotron", config=_nemotron, own=OWN, turns_parts=True, norms_are_one_more=True
    ),
    "gptneox": Architecture(
        model_type="gpt_neox", config=_gpt_neox, own=OWN, turns_parts=True, base="gpt_neox",
        whole={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm"},
        names={
            "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
        },
        rules=lambda config: {"attn_qkv": Rule(rows=_by_head(config.num_attention_heads))},
    ),
}  # fmt: skip
