"""Qwen3-Next and Qwen3.5 in GGUF files: gated delta nets, and attention in every fourth layer.

Files have the value heads of Qwen3.5 in another order. Of r that go with each of G key heads,

    transformers   k0 v0 .. vr-1, k1 v0 .. vr-1, ..      head g * r + v
    llama.cpp      v0 of k0 k1 .. kG-1, v1 of k0 k1 ..   head v * G + g

in rows of all that make values, gates and steps, and in columns of the output. Of Qwen3-Next heads are in order, and
the rows of q, k, v and z, which transformers has head by head, lie one behind the other.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pagebinder.frontend.gguf.architecture import AS_STORED, Architecture, Order, Rule
from pagebinder.frontend.gguf.mixtures import experts
from pagebinder.frontend.gguf.options import Options, rope_of
from pagebinder.frontend.gguf.recurrent import a_log

LINEAR = {
    "ssm_conv1d": "linear_attn.conv1d", "ssm_dt": "linear_attn.dt_bias", "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
QWEN3_NEXT = LINEAR | {
    "attn_qkv": ("linear_attn.in_proj_qkvz", 0), "attn_gate": ("linear_attn.in_proj_qkvz", 1),
    "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba",
}  # fmt: skip
QWEN3_5 = LINEAR | {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}  # fmt: skip


def _config(options: Options) -> dict[str, Any]:
    """Of both; layers are linear but for every fourth, where a file does not say which."""
    interval = options.count("full_attention_interval", 4)
    linear = options.of_layers("attention.recurrent_layers")
    if linear is None:
        linear = [(layer + 1) % interval != 0 for layer in range(options.num_layers)]
    heads, width = options.count("ssm.time_step_rank"), options.count("ssm.inner_size")
    if width % heads:
        options.refuse("ssm.inner_size")
    return {
        "linear_conv_kernel_dim": options.count("ssm.conv_kernel"),
        "linear_key_head_dim": options.count("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_num_key_heads": options.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "layer_types": ["linear_attention" if is_linear else "full_attention" for is_linear in linear],
    }


def _experts(options: Options) -> dict[str, Any]:
    options.get("feed_forward_length")  # of layers without experts, which there are none of
    return experts(options) | {
        "shared_expert_intermediate_size": options.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen3_5(options: Options) -> dict[str, Any]:
    """`rope.dimension_sections`: frequencies of each axis of an image's positions, of text all the same."""
    rope = rope_of(options, options.head_width(), turns_parts=True)
    sections = options.numbers("rope.dimension_sections")
    return _config(options) | {
        "rope_parameters": rope | {"mrope_section": sections[:3], "mrope_interleaved": True}
    }


def _heads_by_key(config: Any) -> np.ndarray:
    """The file's head that each value head is."""
    keys, heads = config.linear_num_key_heads, np.arange(config.linear_num_value_heads)
    per_key = len(heads) // keys
    return heads % per_key * keys + heads // per_key


def _values_by_key(config: Any, width: int) -> Order:
    """Rows, or columns: those of value heads of that width come last."""
    heads = _heads_by_key(config)
    of_values = (heads[:, None] * width + np.arange(width)).reshape(-1)

    def order(count: int) -> np.ndarray:
        before = count - len(of_values)
        return np.concatenate((np.arange(before), before + of_values))

    return order


def _qwen3_5_rules(config: Any) -> dict[str, Rule]:
    wide, single = _values_by_key(config, config.linear_value_head_dim), _values_by_key(config, 1)
    return {
        **{part: Rule(rows=wide) for part in ("attn_qkv", "attn_gate", "ssm_conv1d")},
        **{part: Rule(rows=single) for part in ("ssm_alpha", "ssm_beta")},
        "ssm_dt": Rule(rows=single, is_bare=True),
        "ssm_a": Rule(rows=single, make=a_log, is_bare=True),
        "ssm_out": Rule(columns=wide),
        "ssm_norm": AS_STORED,
    }


def _by_key_head(config: Any) -> Order:
    """Rows of q, k, v and z of a key head after the other, of all q, all k, all v, all z."""
    keys, key, value = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    of_values = config.linear_num_value_heads // keys * value
    starts = np.cumsum([0, *(keys * width for width in (key, key, of_values))])
    parts = [
        start + np.arange(keys * width).reshape(keys, width)
        for start, width in zip(starts, (key, key, of_values, of_values))
    ]
    rows = np.concatenate(parts, axis=1).reshape(-1)
    return lambda count: rows


def _qwen3_next_rules(config: Any) -> dict[str, Rule]:
    return {
        "attn_qkv": Rule(rows=_by_key_head(config)),
        "ssm_in": AS_STORED,  # of older files, which have them head by head
        "ssm_dt": Rule(is_bare=True),
        "ssm_a": Rule(make=a_log, is_bare=True),
        "ssm_norm": AS_STORED,
    }


_LINEAR = functools.partial(Architecture, norms_are_one_more=True, turns_parts=True)
_QWEN3_5 = functools.partial(_LINEAR, names=QWEN3_5, rules=_qwen3_5_rules)
ARCHITECTURES = {
    "qwen3next": _LINEAR(
        model_type="qwen3_next",
        config=lambda options: _config(options) | _experts(options),
        own=frozenset({"intermediate_size"}),
        names=QWEN3_NEXT,
        rules=_qwen3_next_rules,
    ),
    "qwen35": _QWEN3_5(model_type="qwen3_5_text", config=_qwen3_5),
    "qwen35moe": _QWEN3_5(
        model_type="qwen3_5_moe_text",
        config=lambda options: _qwen3_5(options) | _experts(options),
        own=frozenset({"intermediate_size"}),
    ),
}
