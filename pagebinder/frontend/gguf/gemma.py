"""Gemma 1 to 3 in GGUF files, and what Gemma 3n and 4 have in common."""

from __future__ import annotations

from typing import Any

from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf.architecture import Architecture
from pagebinder.frontend.gguf.options import Options, alternating, rope_of

AROUND_FFN = {  # norms before and behind each half of a layer
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

OF_TOKENS = {  # what is added to each layer, by the token
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
OF_TOKENS_IN_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}


def num_shared(options: Options, layers: list[str], default: int = 0) -> int:
    """How many of the last layers have the keys and values of the last layers of their own, which see everything or
    have windows. llama.cpp takes the two in front of them for these."""
    shared = options.get("attention.shared_kv_layers", default)
    if type(shared) is not int or not 0 <= shared < len(layers):
        options.refuse("attention.shared_kv_layers")
    own = layers[: len(layers) - shared]
    if shared and own[-2:] != ["sliding_attention", "full_attention"]:
        options.refuse("attention.shared_kv_layers")
    return shared


def rows_of_tokens(options: Options) -> int:
    """Of the table of what is added to layers: one for each token. Raises CheckpointError: there are others."""
    table, tensors = "per_layer_token_embd.weight", options.file.tensors
    options.require(table)
    rows, tokens = tensors[table].shape[0], tensors["token_embd.weight"].shape[0]
    if rows != tokens:
        raise CheckpointError(f"{options.file.path}: {table} has {rows:,} rows for {tokens:,} tokens.")
    return rows


def keys_and_values_of_shared(config: Any) -> frozenset[str]:
    """Tensors that layers without keys and values of their own have all the same, and that nothing reads."""
    parts, count = ("attn_k", "attn_v", "attn_k_norm"), config.num_hidden_layers
    layers = range(count - config.num_kv_shared_layers, count)
    return frozenset(f"blk.{layer}.{part}.weight" for layer in layers for part in parts)


def _gemma(options: Options) -> dict[str, Any]:
    """Of Gemma 2 and 3: queries are times heads' widths ** -0.5, but in the largest of each. A cap of 0 is none."""
    is_largest = options.num_layers in (46, 62)
    of_largest = options["embedding_length"] // options["attention.head_count"]
    return {
        "query_pre_attn_scalar": of_largest if is_largest else options.head_width(),
        "attn_logit_softcapping": options.get("attn_logit_softcapping") or None,
        "final_logit_softcapping": options.get("final_logit_softcapping") or None,
    }


def _gemma2(options: Options) -> dict[str, Any]:
    return _gemma(options) | {
        "attn_logit_softcapping": options.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": options.number("final_logit_softcapping", 30.0),
        "sliding_window": options.count("attention.sliding_window", 4096),
        "layer_types": alternating(options, 2),
    }


def _gemma3(options: Options) -> dict[str, Any]:
    layers, window = options.num_layers, options.get("attention.sliding_window")
    local = {"rope_type": "default", "rope_theta": options.number("rope.freq_base_swa", 10_000.0)}
    rope = rope_of(options, options.count("attention.key_length"))
    return _gemma(options) | {
        "sliding_window": window or options["context_length"],  # of no layer then
        "layer_types": alternating(options, 6) if window else ["full_attention"] * layers,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


ARCHITECTURES = {
    "gemma": Architecture(model_type="gemma", norms_are_one_more=True),
    "gemma2": Architecture(model_type="gemma2", config=_gemma2, names=AROUND_FFN, norms_are_one_more=True),
    "gemma3": Architecture(
        model_type="gemma3_text", config=_gemma3, names=AROUND_FFN, norms_are_one_more=True
    ),
}
