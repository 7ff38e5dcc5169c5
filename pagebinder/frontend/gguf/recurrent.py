"""Mamba layers in GGUF files, and the models that have nothing else.

A file has -exp(A_log) as `ssm_a`, the norms of Mamba 2 by groups [G, P / G], D of its heads as a column [H, 1].
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf.architecture import Architecture, Rule
from pagebinder.frontend.gguf.options import Options

MAMBA = {
    "ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_a": "A_log",
    "ssm_d": "D", "ssm_out": "out_proj", "ssm_dt_norm": "dt_layernorm", "ssm_b_norm": "b_layernorm",
    "ssm_c_norm": "c_layernorm",
}  # fmt: skip
MAMBA_2 = {
    "ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_dt": "dt_bias", "ssm_a": "A_log", "ssm_d": "D",
    "ssm_norm": "norm", "ssm_out": "out_proj",
}  # fmt: skip
NO_ATTENTION = frozenset(
    {"intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"}
)  # fmt: skip


def inside(module: str, names: Mapping[str, str]) -> dict[str, str]:
    """Names of parts of a module in a layer."""
    return {part: f"{module}.{name}" for part, name in names.items()}


def a_log(a: torch.Tensor) -> torch.Tensor:
    """A_log, of what a file has: -exp(A_log). Raises CheckpointError: it is above 0."""
    if a.device.type != "meta" and not bool((a <= 0).all()):
        raise CheckpointError("ssm_a holds a number that no -exp(A_log) is.")
    return a.neg().log()


def mamba(config: Any) -> dict[str, Rule]:
    return {
        "ssm_a": Rule(make=a_log, is_bare=True),
        "ssm_d": Rule(is_bare=True),
    }


def mamba_2(config: Any) -> dict[str, Rule]:
    return {
        "ssm_a": Rule(make=lambda a: a_log(a).flatten(), is_bare=True),
        "ssm_d": Rule(make=torch.flatten, is_bare=True),
        "ssm_dt": Rule(is_bare=True),
        "ssm_norm": Rule(make=torch.flatten),
    }


# ---- what files say ----------------------------------------------------------------------------------------------


def heads_of_mamba_2(options: Options) -> tuple[int, int]:
    """(how many, how wide each is)"""
    inner, heads = options.count("ssm.inner_size"), options.count("ssm.time_step_rank")
    if inner % heads:
        options.refuse("ssm.time_step_rank")
    return heads, inner // heads


def groups_of_mamba_2(options: Options, norm: type | None = None) -> int:
    """How many groups of heads have B and C, and a norm, in common.

    Args:
        norm: of transformers, which some of its versions have for all heads together.
    Raises:
        CheckpointError: this version has.
    """
    groups, (heads, _) = options.count("ssm.group_count"), heads_of_mamba_2(options)
    if heads % groups:
        options.refuse("ssm.group_count")
    if norm is not None and groups > 1 and "group_size" not in inspect.signature(norm).parameters:
        import transformers

        raise CheckpointError(
            f"{options.file.path} has norms of {groups} groups, which transformers {transformers.__version__} does "
            "not compute; 5.23 does."
        )
    return groups


def expansion(options: Options) -> int:
    """How many channels a Mamba layer has for each of the model's."""
    inner, hidden = options.count("ssm.inner_size"), options.count("embedding_length")
    if inner % hidden:
        options.refuse("ssm.inner_size")
    return inner // hidden


def has_bias(options: Options, part: str) -> bool:
    return bool(options.layers_with(f"{part}.bias"))


def _without_attention(options: Options) -> dict[str, Any]:
    options.ignore("feed_forward_length", "attention.head_count", "attention.head_count_kv")
    return {
        "layer_norm_epsilon": options.number("attention.layer_norm_rms_epsilon"),
        "expand": expansion(options),
        "state_size": options.count("ssm.state_size"),
        "conv_kernel": options.count("ssm.conv_kernel"),
        "use_conv_bias": has_bias(options, "ssm_conv1d"),
    }


def _mamba_alone(options: Options) -> dict[str, Any]:
    config = _without_attention(options) | {"time_step_rank": options.count("ssm.time_step_rank")}
    return config | ({"mixer_rms_eps": config["layer_norm_epsilon"]} if _is_falcon(options) else {})


def _is_falcon(options: Options) -> bool:
    """Falcon Mamba norms time steps, B and C, all with one epsilon there."""
    return bool(options.get("ssm.dt_b_c_rms", False))


def _mamba_2_alone(options: Options) -> dict[str, Any]:
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    heads, width = heads_of_mamba_2(options)
    groups = groups_of_mamba_2(options, MambaRMSNormGated)
    return _without_attention(options) | {"num_heads": heads, "head_dim": width, "n_groups": groups}


_HEAD = dict.fromkeys(("output", "token_embd"), Rule(plain="its model reads the dtype of its weight"))
_EDGES = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
ARCHITECTURES = {
    "mamba2": Architecture(
        model_type="mamba2", config=_mamba_2_alone, own=NO_ATTENTION, base="backbone",
        names={"attn_norm": "norm"} | inside("mixer", MAMBA_2), rules=lambda config: mamba_2(config) | _HEAD,
        whole=_EDGES,
    ),
    "mamba": Architecture(
        model_type=lambda options: "falcon_mamba" if _is_falcon(options) else "mamba",
        config=_mamba_alone, own=NO_ATTENTION, base="backbone",
        names={"attn_norm": "norm"} | inside("mixer", MAMBA), rules=lambda config: mamba(config) | _HEAD,
        whole=_EDGES,
    ),
}  # fmt: skip
