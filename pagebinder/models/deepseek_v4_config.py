"""The configuration of a DeepSeek-V4 model and its translation from and to transformers' config.json."""

import math
from dataclasses import MISSING, dataclass, fields

import torch

from pagebinder.errors import CheckpointError, UnsupportedLayerError

SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
MLP_TYPES = ("hash_moe", "moe")

# What config.json may say only in this way: nothing else is computed.
_FIXED = {
    "model_type": "deepseek_v4",
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al. 2023): pairs that turn fewer than `beta_slow` times over the original context are slowed
    down by `factor`, those that turn more than `beta_fast` times are kept, between them a linear ramp."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # scales cos and sin; None: 0.1 ln(factor) + 1


@dataclass(frozen=True, kw_only=True)
class Rope:
    """RoPE of one kind of layer. `width` counts the rotated channels, the trailing ones of a head."""

    theta: float
    width: int
    yarn: Yarn | None = None

    @property
    def scale(self) -> float:
        """The factor of cos and sin."""
        if self.yarn is None:
            return 1.0
        given = self.yarn.attention_factor
        return 0.1 * math.log(self.yarn.factor) + 1.0 if given is None else given

    def inverse_frequencies(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Angular speed of each interleaved pair, float32 [width / 2]."""
        pair = torch.arange(0, self.width, 2, dtype=torch.float32, device=device)
        inv_freq = 1.0 / self.theta ** (pair / self.width)
        if self.yarn is None:
            return inv_freq
        low, high = self.ramp()
        index = torch.arange(self.width // 2, dtype=torch.float32, device=device)
        slow = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        return inv_freq / self.yarn.factor * slow + inv_freq * (1.0 - slow)

    def ramp(self) -> tuple[int, int]:
        """First and last pair of YaRN's ramp."""

        def pair_that_turns(times: float) -> float:
            length = self.yarn.original_max_position_embeddings
            return self.width * math.log(length / (times * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_that_turns(self.yarn.beta_fast), pair_that_turns(self.yarn.beta_slow)
        return max(math.floor(low), 0), min(math.ceil(high), self.width - 1)


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config:
    """Everything that shapes the model, under transformers' names.

    `rope` serves sliding layers, `compress_rope` layers with a compressor; ratios are tokens per entry.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    rope: Rope
    compress_rope: Rope
    sparse_ratio: int = 4
    heavy_ratio: int = 128
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1

    def __post_init__(self) -> None:
        _check_layers("layer_types", self.layer_types, (SLIDING, SPARSE, HEAVY), self.num_hidden_layers)
        _check_layers("mlp_layer_types", self.mlp_layer_types, MLP_TYPES, self.num_hidden_layers)
        problems = []
        if self.num_attention_heads % self.o_groups:
            problems.append(
                f"num_attention_heads {self.num_attention_heads} is no multiple of o_groups {self.o_groups}"
            )
        if not 0 < self.num_experts_per_tok <= self.n_routed_experts:
            problems.append(f"num_experts_per_tok {self.num_experts_per_tok} of {self.n_routed_experts}")
        if self.rope.width != self.compress_rope.width or self.rope.width % 2:
            problems.append(f"rotary widths {self.rope.width} and {self.compress_rope.width}")
        if self.rope.width > min(self.head_dim, self.index_head_dim):
            problems.append(
                f"rotary width {self.rope.width} exceeds head_dim {self.head_dim} or index_head_dim "
                f"{self.index_head_dim}"
            )
        positive = ("sliding_window", "sparse_ratio", "heavy_ratio", "index_topk", "hc_sinkhorn_iters")
        problems += [
            f"{name} is {getattr(self, name)}, must be at least 1"
            for name in positive
            if getattr(self, name) < 1
        ]
        if problems:
            raise CheckpointError(f"the DeepSeek-V4 config contradicts itself: {'; '.join(problems)}.")

    def ratio(self, layer_type: str) -> int:
        """Tokens per compressed entry; 0 for a sliding layer."""
        return {SLIDING: 0, SPARSE: self.sparse_ratio, HEAVY: self.heavy_ratio}[layer_type]

    @classmethod
    def from_dict(cls, raw: dict) -> "DeepseekV4Config":
        """Read the contents of a config.json as transformers writes it.

        Raises `UnsupportedLayerError` for what the model cannot compute, `CheckpointError` for a missing key.
        """
        for name, wanted in _FIXED.items():
            if raw.get(name, wanted) != wanted or (name == "model_type" and name not in raw):
                raise UnsupportedLayerError(
                    f"{name} {raw.get(name)!r} is not supported for DeepSeek-V4; only {wanted!r} is."
                )
        if raw.get("quantization_config"):
            raise UnsupportedLayerError(
                "quantization_config is set: this model reads float32 and bfloat16 weights; dequantise them first."
            )
        known = {field.name: raw[field.name] for field in fields(cls) if field.name in raw}
        try:
            rates, rope = raw["compress_rates"], raw["rope_parameters"]
            known |= {"layer_types": tuple(raw["layer_types"]), "sparse_ratio": rates[SPARSE]}
            known |= {"mlp_layer_types": tuple(raw["mlp_layer_types"]), "heavy_ratio": rates[HEAVY]}
            known |= {"rope": _read_rope(raw, rope["main"])}
            known |= {"compress_rope": _read_rope(raw, rope["compress"])}
            missing = [f.name for f in fields(cls) if f.name not in known and f.default is MISSING]
            if missing:
                raise KeyError(", ".join(missing))
        except KeyError as error:
            raise CheckpointError(f"config.json of a deepseek_v4 model lacks a key: {error}.") from error
        return cls(**known)

    def to_dict(self) -> dict:
        """The contents of a config.json that `transformers` and `from_dict` both read."""
        raw = {field.name: getattr(self, field.name) for field in fields(self)}
        raw |= {"layer_types": list(self.layer_types), "mlp_layer_types": list(self.mlp_layer_types)}
        raw["compress_rates"] = {SPARSE: raw.pop("sparse_ratio"), HEAVY: raw.pop("heavy_ratio")}
        raw["rope_theta"], raw["compress_rope_theta"] = self.rope.theta, self.compress_rope.theta
        raw["partial_rotary_factor"] = self.rope.width / self.head_dim
        raw["qk_rope_head_dim"] = self.rope.width
        main, compress = raw.pop("rope"), raw.pop("compress_rope")
        raw["rope_parameters"] = {
            "main": _write_rope(main, self.head_dim),
            "compress": _write_rope(compress, self.head_dim),
        }
        return {"architectures": ["DeepseekV4ForCausalLM"], **_FIXED, **raw}


def _check_layers(name: str, types: tuple[str, ...], allowed: tuple[str, ...], num_layers: int) -> None:
    unknown = sorted(set(types) - set(allowed))
    if len(types) != num_layers or unknown:
        raise UnsupportedLayerError(
            f"{name} must name one of {', '.join(allowed)} for each of {num_layers} layers; it has {len(types)}"
            + (f" with {', '.join(map(repr, unknown))}." if unknown else ".")
        )


def _read_rope(raw: dict, rope: dict) -> Rope:
    kind = rope.get("rope_type", "default")
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share is None:
        raise KeyError("partial_rotary_factor")
    width = int(raw["head_dim"] * share)  # truncated, as transformers does
    if kind == "default":
        return Rope(theta=float(rope["rope_theta"]), width=width)
    if kind != "yarn" or rope.get("mscale") or rope.get("mscale_all_dim"):
        raise UnsupportedLayerError(
            f"rope_type {kind!r} {'with mscale ' if kind == 'yarn' else ''}is not supported; supported: default, "
            "yarn with attention_factor."
        )
    factor, length = rope["factor"], rope["original_max_position_embeddings"]
    optional = {
        name: rope[name]
        for name in ("beta_fast", "beta_slow", "attention_factor")
        if rope.get(name) is not None
    }
    yarn = Yarn(factor=factor, original_max_position_embeddings=length, **optional)
    return Rope(theta=float(rope["rope_theta"]), width=width, yarn=yarn)


def _write_rope(rope: Rope, head_dim: int) -> dict:
    written = {"rope_theta": rope.theta, "partial_rotary_factor": rope.width / head_dim}
    if rope.yarn is None:
        return {"rope_type": "default", **written}
    return {"rope_type": "yarn", **vars(rope.yarn), **written}
