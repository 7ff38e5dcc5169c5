"""Latent attention in GGUF files: the models of DeepSeek, and those that are built as they are.

Of V2 scores are a softmax, of V3 sigmoids: the file says which, and with it which model of transformers it is; of one
without experts it is Youtu's. Files are of two ages. Today's hold the matrix of a latent's keys and values in two,

    attn_k_b [H, L, N], attn_v_b [H, V, L]  ->  kv_b_proj [H (N + V), L], of each head its N rows, then its V

and say of attention what llama.cpp computes: one head of keys and values, as wide as the latent L and the R channels
that turn. Older ones hold kv_b_proj, and say how wide heads are. Norms of latents have an epsilon of 1e-6, whatever
that of others is, as transformers has it; llama.cpp takes one for all.
"""

from __future__ import annotations

from typing import Any

import torch

from pagebinder.frontend.gguf.architecture import Architecture, Rule
from pagebinder.frontend.gguf.options import Options, rope_of
from pagebinder.frontend.gguf.routing import (
    CORRECTION,
    SHARED,
    SIGMOID,
    SOFTMAX,
    corrected,
    gating,
    num_dense,
    routed,
)

# GLM-4.7-Flash, whose files may leave out that scores are sigmoids: layers, tokens.
FLASH = ((47, 48), 154_880)


def _scores(options: Options) -> int:
    tokens = options.file.tensors["token_embd.weight"].shape[0]
    is_flash = options.num_layers in FLASH[0] and tokens == FLASH[1]
    return gating(options, SIGMOID if is_flash else SOFTMAX)


def _deepseek(options: Options) -> dict[str, Any]:
    latent, turned = options.count("attention.kv_lora_rank"), options.count("rope.dimension_count")
    keys, values = _head_widths(options, latent, turned)
    has_latent_queries = options.get("attention.q_lora_rank") is not None
    return _routed(options) | {
        "num_key_value_heads": options.count("attention.head_count"),
        "q_lora_rank": options.count("attention.q_lora_rank") if has_latent_queries else None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": keys - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": values,
        "rope_parameters": _rope(options, turned),
        "num_nextn_predict_layers": 0,
    }


def _model_type(options: Options) -> str:
    if not options.get("expert_count"):
        return "youtu"
    return "deepseek_v3" if _scores(options) == SIGMOID else "deepseek_v2"


def _routed(options: Options) -> dict[str, Any]:
    if not options.get("expert_count"):
        return _without_experts(options)
    experts = routed(options)
    if _scores(options) == SIGMOID:
        return experts
    if experts["norm_topk_prob"]:
        options.refuse("expert_weights_norm")
    has_groups = experts["n_group"] > 1
    return experts | {"topk_method": "group_limited_greedy" if has_groups else "greedy"}


def _without_experts(options: Options) -> dict[str, Any]:
    """What is said of experts, as llama.cpp needs it, is of none."""
    if num_dense(options) != options.num_layers:
        options.refuse("leading_dense_block_count")
    for name in ("expert_feed_forward_length", "expert_shared_count"):
        options.get(name)
    return {}


def _head_widths(options: Options, latent: int, turned: int) -> tuple[int, int]:
    """Of keys and values."""
    is_split = options.get("attention.key_length_mla") is not None
    said = {"head_count_kv": 1, "key_length": latent + turned, "value_length": latent}
    if not is_split:
        said = {"head_count_kv": options.count("attention.head_count")}
    for name, count in said.items():
        if options.count(f"attention.{name}") != count:
            options.refuse(f"attention.{name}")
    ending = "_mla" if is_split else ""
    keys = options.count(f"attention.key_length{ending}")
    if keys <= turned:
        options.refuse(f"attention.key_length{ending}")
    return keys, options.count(f"attention.value_length{ending}")


def _rope(options: Options, turned: int) -> dict[str, Any]:
    """YaRN with both of DeepSeek's factors of attention, which are one in all of its models: files have a tenth."""
    rope = rope_of(options, turned)
    if rope["rope_type"] == "yarn":
        factor = round(10 * options.number("rope.scaling.yarn_log_multiplier"), 6)
        return rope | {"mscale": factor, "mscale_all_dim": factor}
    options.get("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] != "default":
        options.refuse("rope.scaling.type")
    return rope


def _expansion(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat((keys.mT, values), dim=1).flatten(0, 1)


ARCHITECTURES = {
    "deepseek2": Architecture(
        model_type=_model_type, config=_deepseek,
        own=frozenset({"num_key_value_heads", "head_dim", "rope_parameters"}),
        names=SHARED | {
            "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": ("self_attn.kv_b_proj", 0), "attn_v_b": ("self_attn.kv_b_proj", 1),
        },
        rules=lambda config: corrected(config) | {part: Rule(make=_expansion) for part in ("attn_k_b", "attn_v_b")},
        no_biases=CORRECTION[1:],
    ),
}  # fmt: skip
