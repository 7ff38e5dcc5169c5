"""GGUF files of tiny models with random blocks, and the plain models that they stand for, by the package `gguf`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from gguf.quants import dequantize
from gguf.tensor_mapping import get_tensor_name_map
from transformers import AutoConfig, AutoModelForCausalLM

HALVES = {  # where the numbers of a block lie, and how many
    "Q4_0": (0, 1), "Q4_1": (0, 2), "Q5_0": (0, 1), "Q5_1": (0, 2), "Q8_0": (0, 1), "IQ4_NL": (0, 1), "Q2_K": (80, 2),
    "Q3_K": (108, 1), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1), "IQ4_XS": (0, 1), "IQ3_XXS": (0, 1),
}  # fmt: skip
MIDDLES = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
SIZES = dict(
    vocab_size=96, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
HEAD = {"head_dim": 64}
THETA = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = THETA | {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = THETA | {
    "rope_type": "longrope", "original_max_position_embeddings": 128,
    "attention_factor": 1.0, "short_factor": [1 + i / 100 for i in range(32)],
    "long_factor": [1 + i / 5 for i in range(32)],
}  # fmt: skip
TWO_ROPES = {
    "full_attention": THETA | {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": THETA,
}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip

# name -> architecture of the file, model_type, options of its config, options of the file beyond the common ones
MODELS = {
    "llama": ("llama", "llama", HEAD | {"rope_parameters": LLAMA3}, {}),
    "llama biases": ("llama", "llama", HEAD | {"attention_bias": True, "mlp_bias": True}, {}),
    "mixtral": (
        "llama", "mixtral", HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": YARN}, {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
    }),
    "qwen3": ("qwen3", "qwen3", HEAD | {"tie_word_embeddings": True}, {}),
    "qwen2vl": ("qwen2vl", "qwen2", {}, {"rope.dimension_sections": [8, 12, 12, 0]}),
    "qwen3vl": (
        "qwen3vl", "qwen3", HEAD, {"rope.dimension_sections": [12, 10, 10, 0], "n_deepstack_layers": 3},
    ),
    "qwen3vlmoe": ("qwen3vlmoe", "qwen3_moe", HEAD | EXPERTS | {"norm_topk_prob": True}, {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256,
        "rope.dimension_sections": [12, 10, 10, 0], "n_deepstack_layers": 3,
    }),
    "qwen2moe": (
        "qwen2moe", "qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 256, "norm_topk_prob": False},
        {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256,
            "expert_shared_feed_forward_length": 256,
        },
    ),
    "qwen3moe": ("qwen3moe", "qwen3_moe", HEAD | EXPERTS | {"norm_topk_prob": True}, {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256,
    }),
    "gemma": ("gemma", "gemma", HEAD, {}),
    "gemma2": (
        "gemma2", "gemma2", HEAD | {"sliding_window": 16, "query_pre_attn_scalar": 64},
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 16},
    ),
    "gemma3": (
        "gemma3", "gemma3_text",
        HEAD
        | {"sliding_window": 16, "query_pre_attn_scalar": 64, "num_hidden_layers": 6, "rope_parameters": TWO_ROPES},
        {
            "attention.sliding_window": 16, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
            "rope.freq_base": 1e6, "rope.freq_base_swa": 10_000.0,
        },
    ),
    "phi3": ("phi3", "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128, "pad_token_id": 0}, {
        "rope.scaling.original_context_length": 128, "attention.sliding_window": 0,
    }),
    "granite": (
        "granite", "granite",
        {
            "attention_multiplier": 0.02, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
            "logits_scaling": 8.0, "tie_word_embeddings": True,
        },
        {"attention.scale": 0.02, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0},
    ),
    "gpt-oss": (
        "gpt-oss", "gpt_oss",
        HEAD | {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
            "rope_parameters": YARN | {"truncate": False},
        },
        {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256,
            "attention.sliding_window": 16, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "seed_oss": ("seed_oss", "seed_oss", HEAD, {}),
    "ernie4_5": ("ernie4_5", "ernie4_5", HEAD, {}),
    "hunyuan": ("hunyuan-dense", "hunyuan_v1_dense", HEAD, {}),
    "exaone4": (
        "exaone4", "exaone4", HEAD | {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 4},
        {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "exaone4 without windows": (
        "exaone4", "exaone4", HEAD | {"sliding_window": None, "layer_types": ["full_attention"] * 2}, {}
    ),
    "glm4": (
        "glm4", "glm4",
        HEAD | {"attention_bias": True, "rope_parameters": THETA | {"partial_rotary_factor": 0.5}, "pad_token_id": 0},
        {"rope.dimension_count": 32},
    ),
    "arcee": ("arcee", "arcee", HEAD, {}),
    "olmoe": (
        "olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, {"expert_count": 4, "expert_used_count": 2},
    ),
    "granitemoe": (
        "granitemoe", "granitemoe",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.02,
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
        },
        {
            "expert_count": 4, "expert_used_count": 2, "attention.scale": 0.02, "embedding_scale": 12.0,
            "residual_scale": 0.22, "logit_scale": 8.0,
        },
    ),
    "lfm2": (
        "lfm2", "lfm2",
        {
            "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
        {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
    ),
    "mistral3": ("mistral3", "mistral", HEAD | {"sliding_window": None}, {"rope.dimension_count": 64}),
    "ministral3": (
        "mistral3", "ministral3",
        HEAD | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1,
        },
    ),
    "olmo3": (
        "olmo2", "olmo3",
        {
            "num_hidden_layers": 4, "sliding_window": 16,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": THETA},
        },
        {
            "attention.sliding_window": 16, "attention.sliding_window_pattern": [True, True, True, False],
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
        },
    ),
    "internlm2": ("internlm2", "llama", HEAD, {}),
    "exaone": ("exaone", "llama", HEAD | {"rope_parameters": LLAMA3}, {"rope.dimension_count": 64}),
    "minicpm": (
        "minicpm", "granite",
        {
            "attention_multiplier": 0.125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
            "logits_scaling": 8.0, "rope_parameters": LONG,
        },
        {
            "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 128,
        },
    ),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4, "pad_token_id": 0, "use_sliding_window": False}, {}),
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """What a tensor of a file holds of a parameter (or of a view of one).

    `rows`, `columns`: which of the parameter's each of the file's is. `change`: the file's values, of the
    parameter's, both float32 arrays; such a tensor is never of blocks.
    """

    parameter: torch.Tensor
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    change: Callable[[np.ndarray], np.ndarray] | None = None


# Architecture -> the tensors of its files by llama.cpp's names, of a model; without one by the names of `gguf`.
TENSORS: dict[str, Callable[[torch.nn.Module], dict[str, Stored]]] = {}
EXPANDED: dict[str, set[str]] = {}  # architecture -> why some of its linear layers keep no codes
# Architecture -> what makes its random models ready: values that are no parameters, or want another size.
READY: dict[str, Callable[[torch.nn.Module], None]] = {}
EPSILONS = ("norm_eps", "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
PAIRED = ("llama", "granite", "smollm3", "arcee", "granitemoe", "mistral3", "internlm2", "minicpm")
ONE_MORE = ("gemma", "gemma2", "gemma3", "nemotron")


def random_blocks(shape: tuple[int, ...], kind: str, seed: int = 0) -> np.ndarray:
    """uint8 [..., bytes of a row]: weights of about 0.05."""
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(119, 123, blocks.shape[:-1])
    else:
        at, count = HALVES[kind]
        largest = {
            "Q8_0": 127,
            "IQ4_NL": 127,
            "IQ4_XS": 4000,
            "Q6_K": 4000,
            "Q3_K": 128,
            "Q4_K": 900,
            "Q5_K": 2000,
        }
        numbers = generator.uniform(0.5, 1, (*blocks.shape[:-1], count)) * 0.08 / largest.get(kind, 15)
        if count == 2:  # so that weights are about zero in the middle
            numbers[..., 1] = numbers[..., 0] * MIDDLES[kind]
        blocks[..., at : at + 2 * count] = numbers.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def plain_model(name: str, **options):
    architecture, model_type, of_model, _ = MODELS[name]
    sizes = SIZES | {"eos_token_id": None, "bos_token_id": None} | of_model | options
    if "rope_parameters" not in sizes:
        sizes["rope_parameters"] = THETA
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    with torch.no_grad():
        for key, parameter in _weights(model).items():
            parameter.normal_(0, 0.05)
            if parameter.dim() == 1 and "norm" in key and name not in ONE_MORE:
                parameter.add_(1)
        READY.get(architecture, lambda model: None)(model)
    return model


def _weights(model) -> dict[str, torch.Tensor]:
    """Parameters, and buffers that are kept: corrections of routers."""
    kept = model.state_dict()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}


def write_gguf(
    path: Path, name: str, kinds: dict[str, str] | str = "F32", more: dict | None = None, **options
):
    """A file of the model `name`; the plain model that it stands for, in float32.

    Args:
        kinds: parts of llama.cpp's names -> the kind of their weights, the first that fits; or one kind for all.
        more: options of the file; None leaves one out. options: of the config.
    """
    architecture, _, _, of_file = MODELS[name]
    model, kinds = plain_model(name, **options), {"": kinds} if isinstance(kinds, str) else kinds
    config = model.config
    writer = GGUFWriter(path, architecture)
    for key, value in (_common(config) | of_file | (more or {})).items():
        if value is not None:
            add = {
                str: writer.add_string,
                float: writer.add_float32,
                bool: writer.add_bool,
                list: writer.add_array,
            }
            key = (
                key
                if "." in key and key.split(".")[0] in ("general", "tokenizer", "split")
                else f"{architecture}.{key}"
            )
            add.get(type(value), writer.add_uint32)(key, value)
    with torch.no_grad():
        tensors = (
            TENSORS[architecture](model) if architecture in TENSORS else named_tensors(model, architecture)
        )
        for seed, (tensor, stored) in enumerate(tensors.items()):
            _write(writer, tensor, stored, _kind(tensor, stored, kinds), seed)
    _write_frequencies(writer, name, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _common(config) -> dict:
    said = config.to_dict()  # what layers of a config have of their own is no attribute of it
    heads, hidden = said.get("num_attention_heads"), config.hidden_size
    head = said.get("head_dim") or hidden // heads
    epsilons = (said.get(name) for name in EPSILONS)
    return {
        "context_length": config.max_position_embeddings, "embedding_length": hidden,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads, "attention.head_count_kv": said.get("num_key_value_heads"),
        "attention.key_length": head, "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(next(epsilon for epsilon in epsilons if epsilon)),
        "rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "no_vocab",
    }  # fmt: skip


def named_tensors(model, architecture: str) -> dict[str, Stored]:
    """llama.cpp's name -> what it holds."""
    return {
        name: _stored(name, values, architecture, model.config)
        for name, values in _named(model, architecture).items()
    }


def _stored(name: str, values: torch.Tensor, architecture: str, config) -> Stored:
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    heads = next((n for part, n in heads.items() if part in name and architecture in PAIRED), None)
    change = None
    if architecture in ONE_MORE and name.endswith("norm.weight"):
        change = one_more
    elif "inp_shexp" in name:
        change = lambda values: values[0]  # noqa: E731
    elif "shortconv.conv" in name:
        change = lambda values: values[:, 0]  # noqa: E731
    return Stored(values, None if heads is None else pairs(len(values), heads), change=change)


def one_more(values: np.ndarray) -> np.ndarray:
    return values + 1


def pairs(num_rows: int, heads: int) -> np.ndarray:
    """The two halves of a head in turns, as llama.cpp has them."""
    return np.arange(num_rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _named(model, architecture: str) -> dict[str, torch.Tensor]:
    """llama.cpp's name -> the parameter, or the part of one, that it holds."""
    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == architecture)
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    found = {}
    for key, parameter in _weights(model).items():
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            found[f"blk.{key.split('.')[2]}.exp_probs_b.bias"] = parameter
            continue
        if key.endswith(".sinks"):
            found[f"blk.{key.split('.')[2]}.attn_sinks.weight"] = parameter
            continue
        if architecture == "gpt-oss" and ".experts." in key:
            found |= _alternating_experts(key, parameter)
            continue
        if match := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(gate_up|down)_proj", key):
            parts = parameter.chunk(2, dim=1) if match[2] == "gate_up" else [parameter]
            for part, values in zip(("gate", "up") if match[2] == "gate_up" else ("down",), parts):
                found[f"blk.{match[1]}.ffn_{part}_exps.weight"] = values
            continue
        owner, _, kind = key.rpartition(".")
        found[f"{names.get_name(owner) or names.get_name(f'{owner}.layer')}.{kind}"] = parameter
    return found


def _alternating_experts(key: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of gpt-oss: [E, K, N], columns of gates and ups in turns; biases [E, N]."""
    layer, kind = key.split(".")[2], "bias" if key.endswith("_bias") else "weight"
    parts = {"down": parameter}
    if "gate_up" in key:
        parts = {"gate": parameter[..., ::2], "up": parameter[..., 1::2]}
    return {
        f"blk.{layer}.ffn_{part}_exps.{kind}": values if kind == "bias" else values.mT
        for part, values in parts.items()
    }


def _kind(tensor: str, stored: Stored, kinds: dict[str, str]) -> str:
    is_plain = any(part in tensor for part in ("ffn_gate_inp", ".bias", "altup"))
    if stored.parameter.dim() == 1 or is_plain or stored.change is not None:
        return "F32"
    kind = next(kind for part, kind in kinds.items() if part in tensor)
    columns = stored.parameter.shape[-1]
    fits = (
        each
        for each in (kind, "Q8_0", "F32")
        if columns % GGML_QUANT_SIZES[GGMLQuantizationType[each]][0] == 0
    )
    return next(fits)  # another kind where rows are too short, as llama.cpp's quantiser does


def _write(writer, tensor: str, stored: Stored, kind: str, seed: int) -> None:
    """A tensor; of blocks, the parameter becomes what they stand for."""
    values = stored.parameter.detach().numpy()  # of the same memory
    outer = values.shape[: "_exps." in tensor and values.ndim == 3]
    rows = np.arange(values.shape[len(outer)]) if stored.rows is None else stored.rows
    places = (*map(np.arange, outer), rows)
    if stored.columns is not None:
        places = (*places, stored.columns)
    places = np.ix_(*places)
    if kind == "F32":
        found = values[places] if stored.change is None else stored.change(values[places])
        writer.add_tensor(tensor, np.ascontiguousarray(found, dtype=np.float32))
        return
    blocks = random_blocks(values[places].shape, kind, seed)
    values[places] = dequantize(blocks, GGMLQuantizationType[kind])
    writer.add_tensor(tensor, blocks, raw_dtype=GGMLQuantizationType[kind])


def _write_frequencies(writer, name: str, model) -> None:
    rope = model.config.rope_parameters or {}
    if rope.get("rope_type") == "llama3":
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, 64, 2).float() / 64)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for part in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        writer.add_tensor(f"rope_factors_{part}.weight", np.array(rope[f"{part}_factor"], dtype=np.float32))


# Families with files of their own, which register what they have.
from tests.frontend import (  # noqa: E402
    gguf_gemma_files,  # noqa: F401
    gguf_latent_files,  # noqa: F401
    gguf_layer_norm_files,  # noqa: F401
    gguf_mixture_files,  # noqa: F401
    gguf_qwen_files,  # noqa: F401
    gguf_recurrent_files,  # noqa: F401
)
