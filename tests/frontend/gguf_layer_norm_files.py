"""Models with LayerNorm for gguf_files.py."""

from __future__ import annotations

import numpy as np

from tests.frontend.gguf_files import HEAD, MODELS, TENSORS, THETA, Stored, named_tensors

LAYER_NORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
COHERE = {"logit_scale": 0.25, "pad_token_id": 0}
OF_COHERE = LAYER_NORM | {"logit_scale": 0.25, "rope.scaling.type": "none"}
HALF = {"rope_parameters": THETA | {"partial_rotary_factor": 0.5}}
OF_HALF = LAYER_NORM | {"rope.dimension_count": 32}
OF_NEOX = OF_HALF | {"attention.head_count_kv": None}

MODELS |= {
    "command-r": ("command-r", "cohere", COHERE, OF_COHERE),
    "command-r plus": ("command-r", "cohere", COHERE | {"use_qk_norm": True}, OF_COHERE),
    "cohere2": (
        "cohere2", "cohere2", COHERE | {"num_hidden_layers": 4, "sliding_window": 16},
        OF_COHERE | {"attention.sliding_window": 16, "rope.dimension_count": 64},
    ),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None}, LAYER_NORM),
    "phi2": ("phi2", "phi", HALF, OF_HALF),
    "stablelm": ("stablelm", "stablelm", HALF | {"use_qkv_bias": True}, OF_HALF | {"use_parallel_residual": True}),
    "stablelm side by side": ("stablelm", "stablelm", HALF | {"use_parallel_residual": True}, OF_HALF),
    "nemotron": (
        "nemotron", "nemotron", HEAD | HALF,
        OF_HALF | {"rope.scaling.type": "none", "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 96},
    ),
    "gptneox": ("gptneox", "gpt_neox", HALF, OF_NEOX | {"use_parallel_residual": True}),
    "gptneox one by one": (
        "gptneox", "gpt_neox", HALF | {"use_parallel_residual": False}, OF_NEOX | {"use_parallel_residual": False},
    ),
}  # fmt: skip


def _gpt_neox(model) -> dict[str, Stored]:
    """Queries of all heads, keys of all, values of all."""
    found = named_tensors(model, "gptneox")
    for name, stored in found.items():
        if "attn_qkv" in name:
            rows = np.arange(len(stored.parameter)).reshape(model.config.num_attention_heads, 3, -1)
            found[name] = Stored(stored.parameter, rows.swapaxes(0, 1).reshape(-1))
    return found


TENSORS["gptneox"] = _gpt_neox
