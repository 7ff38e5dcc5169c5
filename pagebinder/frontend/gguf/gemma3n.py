"""Gemma 3n in GGUF files.

llama.cpp's graph has four streams, the first of them active, gates of 95 % zeros in its first ten layers, and keys
and values in the first twenty. Here it has what a file says, and these where one says nothing.
"""

from __future__ import annotations

import math
from typing import Any

from pagebinder.frontend.gguf.architecture import Architecture
from pagebinder.frontend.gguf.gemma import (
    AROUND_FFN,
    OF_TOKENS,
    OF_TOKENS_IN_LAYER,
    keys_and_values_of_shared,
    num_shared,
    rows_of_tokens,
)
from pagebinder.frontend.gguf.options import Options, alternating, rope_of

OWN_KEYS, SPARSE = 20, 10  # layers, where files do not say
ZEROS = 1.6448533535003662  # standard deviations: of a normal distribution 95 % are below


def _gemma3n(options: Options) -> dict[str, Any]:
    layers, head = alternating(options, 5), options.head_width()
    options.require("blk.0.laurel_l.weight")
    local = {"rope_type": "default", "rope_theta": options.number("rope.freq_base_swa", 10_000.0)}
    return {
        "sliding_window": options.count("attention.sliding_window"),
        "layer_types": layers,
        "rope_parameters": {"full_attention": rope_of(options, head), "sliding_attention": local},
        "final_logit_softcapping": options.number("final_logit_softcapping", 30.0),
        "num_kv_shared_layers": num_shared(options, layers, max(len(layers) - OWN_KEYS, 0)),
        "vocab_size_per_layer_input": rows_of_tokens(options),
        "hidden_size_per_layer_input": options.count("embedding_length_per_layer_input", 256),
        "altup_num_inputs": options.count("altup.num_inputs", 4),
        "altup_active_idx": _active(options),
        "laurel_rank": options.file.tensors["blk.0.laurel_l.weight"].shape[0],
        "activation_sparsity_pattern": _zeros(options),
    }


def _active(options: Options) -> int:
    number = options.get("altup.active_idx", 0)
    if type(number) is not int or not 0 <= number < options.count("altup.num_inputs", 4):
        options.refuse("altup.active_idx")
    return number


def _zeros(options: Options) -> list[float]:
    """Which part of each layer's gates becomes zero. A file says how many standard deviations are added to their mean
    for that, minus infinity where none do."""
    scales = options.of_layers("activation_sparsity_scale")
    if scales is None:
        scales = [ZEROS if layer < SPARSE else -math.inf for layer in range(options.num_layers)]
    if not all(isinstance(scale, float) and scale < math.inf for scale in scales):
        options.refuse("activation_sparsity_scale")
    return [round((1 + math.erf(scale / math.sqrt(2))) / 2, 6) for scale in scales]


ARCHITECTURES = {
    "gemma3n": Architecture(
        model_type="gemma3n_text", config=_gemma3n, own=frozenset({"rope_parameters"}),
        whole=OF_TOKENS | {
            "altup_proj": "model.altup_projections", "altup_unembd_proj": "model.altup_unembed_projections",
        },
        stacked=("altup_proj", "altup_unembd_proj"),
        names=AROUND_FFN | OF_TOKENS_IN_LAYER | {
            "altup_correct_coef": "altup.correction_coefs", "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm",
            "altup_correct_scale.weight": "altup.correct_output_scale",
            "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        unread=keys_and_values_of_shared,
    ),
}  # fmt: skip
