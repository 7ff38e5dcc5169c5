"""Gemma's models in GGUF files."""

from __future__ import annotations

from typing import Any

from pagebinder.frontend.gguf.architecture import Architecture
from pagebinder.frontend.gguf.options import Options, alternating, rope_of

AROUND_FFN = {  # norms before and behind each half of a layer
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


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
