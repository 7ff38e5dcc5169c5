"""The configuration of a Llama-family model and its translation from and to config.json."""

import math
from dataclasses import dataclass, fields

import torch

from pagebinder.errors import CheckpointError, UnsupportedLayerError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Everything that shapes the model. `layer_types`: "full_attention" or "sliding_attention" per layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    model_type: str = "llama"

    @classmethod
    def from_dict(cls, raw: dict) -> "LlamaConfig":
        """Read the contents of a config.json.

        Raises `UnsupportedLayerError` for what the model cannot compute, `CheckpointError` for a missing key.
        """
        model_type = raw.get("model_type")
        if model_type not in ARCHITECTURES:
            raise UnsupportedLayerError(
                f"model_type {model_type!r} is not supported here; these are: {', '.join(ARCHITECTURES)}."
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise UnsupportedLayerError(f"hidden_act {raw['hidden_act']!r} is not supported; only 'silu' is.")
        names = {field.name for field in fields(cls)} - {"layer_types", "rope_theta", "rope_scaling"}
        known = {name: raw[name] for name in names if name in raw}
        theta, scaling = _read_rope(raw)
        try:
            if model_type == "llama" and known.get("num_key_value_heads") is None:
                known["num_key_value_heads"] = raw["num_attention_heads"]
            if known.get("head_dim") is None:
                from_width = raw["hidden_size"] // raw["num_attention_heads"]
                known["head_dim"] = 128 if model_type == "qwen3" else from_width
            window, layer_types = _read_layer_types(raw)
            known |= {"rope_theta": theta, "rope_scaling": scaling}
            return cls(**known | {"sliding_window": window, "layer_types": layer_types})
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"config.json of a {model_type} model lacks a key: {error}.") from error

    def to_dict(self) -> dict:
        """The contents of a config.json that `transformers` and `from_dict` both read."""
        raw = {field.name: getattr(self, field.name) for field in fields(self)}
        raw["layer_types"] = list(self.layer_types)
        scaling = raw.pop("rope_scaling")
        rope = {"rope_type": "llama3", **vars(scaling)} if scaling else {"rope_type": "default"}
        raw["rope_parameters"] = {**rope, "rope_theta": raw.pop("rope_theta")}
        if self.model_type != "qwen3":
            del raw["layer_types"]
        if self.model_type == "llama":
            del raw["sliding_window"]
        if self.model_type == "qwen3":
            raw["use_sliding_window"] = self.sliding_window is not None
        return {"architectures": [ARCHITECTURES[self.model_type]], "hidden_act": "silu", **raw}


def _read_layer_types(raw: dict) -> tuple[int | None, tuple[str, ...]]:
    num_layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window", 4096)  # the value `transformers` assumes when Mistral's file has none
    if raw["model_type"] == "llama" or (raw["model_type"] == "qwen3" and not raw.get("use_sliding_window")):
        window = None
    if window is None:
        return None, ("full_attention",) * num_layers
    first_sliding = raw.get("max_window_layers", 28) if raw["model_type"] == "qwen3" else 0
    default = ["full_attention" if i < first_sliding else "sliding_attention" for i in range(num_layers)]
    layer_types = tuple(raw.get("layer_types") or default)
    if len(layer_types) != num_layers or set(layer_types) - {"full_attention", "sliding_attention"}:
        raise UnsupportedLayerError(
            f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers, "
            f"not {layer_types}."
        )
    return window, layer_types


def _read_rope(raw: dict) -> tuple[float, Llama3Rope | None]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedLayerError(f"rope_parameters per layer type ({', '.join(rope)}) are not supported.")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedLayerError("a partial_rotary_factor other than 1 is not supported.")
    if kind == "default":
        return float(theta), None
    if kind == "llama3":
        try:
            scaling = Llama3Rope(**{field.name: rope[field.name] for field in fields(Llama3Rope)})
        except KeyError as error:
            raise CheckpointError(f"rope_type 'llama3' in config.json lacks {error}.") from error
        return float(theta), scaling
    raise UnsupportedLayerError(f"rope_type {kind!r} is not supported; supported: default, llama3.")


def inverse_frequencies(config: LlamaConfig, device: torch.device | str | None = None) -> torch.Tensor:
    """Angular speed of each rotary pair, float32 [D/2], with the frequency scaling of Llama 3.1 if set."""
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    inv_freq = 1.0 / (config.rope_theta ** (pair / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return keep * inv_freq + (1.0 - keep) * inv_freq / scaling.factor
