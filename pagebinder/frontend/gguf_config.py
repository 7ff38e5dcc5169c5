"""What a GGUF file says of its model -> a config of transformers, by architecture.

Keys are "ARCHITECTURE.name". Each one must be known: one that nothing reads could mean another model, so it is an
error, as is one that a model needs and the file lacks. Where llama.cpp's code knows what files do not say (which
layers of Gemma have windows), the same is said here. Another architecture is an entry in ARCHITECTURES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf_file import GgufFile

# Parts of names, and what they are in the decoders of transformers. `{}`: the layer.
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_qkv": "self_attn.qkv_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
AROUND_FFN = {  # of Gemma: norms before and behind each half of a layer
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
BEHIND_HALVES = {  # of OLMo 2: behind them alone
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PAIRED = frozenset(
    {"attn_q", "attn_k"}
)  # whose rows llama.cpp turns in pairs of neighbours, transformers in halves
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
MOST = 1 << 27  # of layers, tokens, channels
# What says nothing of how a model computes.
SILENT = frozenset({"vocab_size", "rope.scaling.finetuned", "attention.causal"})


class Options:
    """The options of a file's architecture; what is read is remembered."""

    def __init__(self, file: GgufFile):
        self.file, self._prefix, self._read = file, f"{file.architecture}.", set()

    def get(self, name: str, default: Any = None) -> Any:
        """A list of equal values, one for each layer, is that value."""
        self._read.add(name)
        value = self.file.options.get(self._prefix + name, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            return value[0]
        if isinstance(value, list):
            raise CheckpointError(
                f"{self.file.path}: {self._prefix}{name} differs from layer to layer, which is not served."
            )
        return value

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"{self.file.path} lacks {self._prefix}{name}.")
        return value

    def number(self, name: str, default: float | None = None) -> Any:
        """One that is positive, and finite. Raises CheckpointError: it is missing, or something else."""
        value = self[name] if default is None else self.get(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            self.refuse(name)
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """One that is whole, too, and no more than a model may have of anything."""
        value = self.number(name, default)
        if not isinstance(value, int) or value > MOST:
            self.refuse(name)
        return value

    def head_width(self) -> int:
        equal = max(self.count("embedding_length") // self.count("attention.head_count"), 1)
        return self.count("attention.key_length", equal)

    def of_layers(self, name: str) -> list | None:
        """A list with a value for each layer; None: it is something else."""
        value = self.file.options.get(self._prefix + name)
        if not isinstance(value, list):
            return None
        self._read.add(name)
        if len(value) != self["block_count"]:
            self.refuse(name)
        return value

    def factors(self, name: str, count: int) -> np.ndarray:
        """A tensor of factors of RoPE's frequencies, float32 [count].

        Raises:
            CheckpointError: there are others.
        """
        tensor = self.file.tensors[name]
        values = tensor.data.astype(np.float32) if tensor.kind in ("F32", "F16") else np.zeros(0)
        if values.shape != (count,) or not (np.isfinite(values) & (values > 0)).all():
            raise CheckpointError(
                f"{self.file.path}: {name} {list(tensor.shape)} in {tensor.kind} is not {count} positive factors."
            )
        return values

    def refuse(self, name: str) -> None:
        value = self.file.options.get(self._prefix + name)
        raise CheckpointError(f"{self.file.path}: {self._prefix}{name} = {value!r} is not served.")

    def require(self, *tensors: str) -> None:
        """Raises CheckpointError: one is missing."""
        if missing := [name for name in tensors if name not in self.file.tensors]:
            raise CheckpointError(f"{self.file.path} lacks {missing[0]}.")

    def check_all_read(self) -> None:
        """Raises CheckpointError: the file says something that nothing has read."""
        said = (
            name.removeprefix(self._prefix) for name in self.file.options if name.startswith(self._prefix)
        )
        if unread := [name for name in said if name not in self._read and name not in SILENT]:
            self.refuse(unread[0])

    def has(self, *tensors: str) -> bool:
        return any(name in self.file.tensors for name in tensors)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """`model_type`: of transformers. `config`: options -> what its config has beyond what `config_of` says.

    `names`: parts of names that differ from LAYER. `paired`: those whose rows are in pairs of neighbours.
    `norms_are_one_more`: weights of norms have 1 added. `frequencies`: tensors about RoPE that it may have.
    `turns_parts`: some of a head's width may be left as it is by RoPE. `bare`: parts that are parameters, not modules
    with a weight. `whole`: names that are of no layer and unusual. `experts`: where they are in a layer.
    `experts_alternate`: rows of gates and ups take turns in transformers' experts, whose matrices are transposed.
    `has_other_layers`: some have no attention, and no heads of keys and values.
    """

    model_type: str | Callable[[Options], str]
    config: Callable[[Options], dict[str, Any]] = lambda options: {}
    names: Mapping[str, str] = field(default_factory=dict)
    paired: frozenset[str] = frozenset()
    norms_are_one_more: bool = False
    frequencies: tuple[str, ...] = ()
    turns_parts: bool = False
    bare: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    experts: str = "mlp.experts"
    experts_alternate: bool = False
    has_other_layers: bool = False


def architecture_of(file: GgufFile) -> Architecture:
    """Raises CheckpointError: it is not served."""
    if file.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} holds a model of the architecture {file.architecture!r}; of GGUF files "
            f"{', '.join(sorted(ARCHITECTURES))} are served. The model's safetensors may be: give their directory."
        )
    return ARCHITECTURES[file.architecture]


def config_of(file: GgufFile):
    """The config of transformers that describes a file's model.

    Raises:
        CheckpointError: an architecture, or something that the file says of it, is not served; something is missing.
    """
    from transformers import AutoConfig

    architecture, options = architecture_of(file), Options(file)
    options.require("token_embd.weight")
    if options.get("attention.causal", True) is not True:
        options.refuse("attention.causal")
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if options.count("block_count") > len(layers):
        raise CheckpointError(
            f"{file.path} says that it has {options['block_count']:,} layers, and holds tensors of {len(layers)}."
        )
    heads, head = options.count("attention.head_count"), options.head_width()
    if options.get("attention.value_length", head) != head:
        options.refuse("attention.value_length")
    kind = architecture.model_type
    said = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": options.count("embedding_length"),
        "intermediate_size": options.count("feed_forward_length"),
        "num_hidden_layers": options.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(options, architecture, heads),
        "head_dim": head,
        "max_position_embeddings": options.count("context_length"),
        "rms_norm_eps": options.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(options, head, architecture.turns_parts),
        "tie_word_embeddings": not options.has("output.weight"),
        "pad_token_id": None,
        "dtype": _dtype(file),
    } | architecture.config(options)
    options.check_all_read()
    model_type = kind if isinstance(kind, str) else kind(options)
    try:
        return AutoConfig.for_model(model_type, **said)
    except Exception as error:
        raise CheckpointError(
            f"{file.path} describes no {model_type} that transformers takes: {error}"
        ) from error


def _kv_heads(options: Options, architecture: Architecture, heads: int) -> int:
    of_layers = options.of_layers("attention.head_count_kv") if architecture.has_other_layers else None
    if of_layers is None:
        return options.count("attention.head_count_kv", heads)
    found = {count for count in of_layers if count != 0}
    if len(found) != 1 or not all(isinstance(count, int) and 0 < count <= heads for count in found):
        options.refuse("attention.head_count_kv")
    return found.pop()


def _dtype(file: GgufFile) -> str:
    """That of matrices if they are plain, else bfloat16."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    kinds = kinds - {"F32"} or kinds  # routers are in float32 whatever the others are
    plain = {"F32": "float32", "F16": "float16"}
    return plain.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _rope(options: Options, head: int, turns_parts: bool = False) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": options.number("rope.freq_base", 10_000.0)}
    if (turned := options.count("rope.dimension_count", head)) != head:
        if not turns_parts:
            options.refuse("rope.dimension_count")
        rope["partial_rotary_factor"] = turned / head
    kind = options.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": options.number("rope.scaling.factor")}
    elif kind not in ("none", "longrope"):
        options.refuse("rope.scaling.type")
    original = options.count("rope.scaling.original_context_length", options.count("context_length"))
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original
        for name, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if options.get(f"rope.scaling.{name}") is not None:
                rope[ours] = options.number(f"rope.scaling.{name}")
    if options.has(*FREQUENCIES[1:]):
        options.require(*FREQUENCIES[1:])
        if kind not in ("none", "longrope"):
            options.refuse("rope.scaling.type")
        factors = (options.factors(name, turned // 2).tolist() for name in FREQUENCIES[1:])
        rope |= dict(zip(("long_factor", "short_factor"), factors))
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        rope["attention_factor"] = options.number("rope.scaling.attn_factor", 1.0)
    elif kind == "longrope":
        options.refuse("rope.scaling.type")
    return rope


def _biases(options: Options) -> dict[str, Any]:
    return {
        "attention_bias": options.has("blk.0.attn_q.bias"),
        "mlp_bias": options.has("blk.0.ffn_up.bias"),
    }


def _counts(options: Options) -> tuple[int, int]:
    """Of experts, and of those that a token goes to."""
    count, used = options.count("expert_count"), options.count("expert_used_count")
    if used > count:
        options.refuse("expert_used_count")
    return count, used


def _experts(options: Options) -> dict[str, Any]:
    count, used = _counts(options)
    return {
        "num_experts_per_tok": used,
        "moe_intermediate_size": options.count("expert_feed_forward_length"),
        "num_experts": count,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _llama(options: Options) -> dict[str, Any]:
    if options.get("expert_count"):
        count, used = _counts(options)
        return {"num_local_experts": count, "num_experts_per_tok": used}
    options.get("expert_used_count")
    return _biases(options)


def _granite(options: Options) -> dict[str, Any]:
    if options.get("rope.scaling.finetuned") is False:  # which says there: no positions
        options.refuse("rope.scaling.finetuned")
    return _biases(options) | {
        "attention_multiplier": options.number("attention.scale"),
        "embedding_multiplier": options.number("embedding_scale", 1.0),
        "residual_multiplier": options.number("residual_scale", 1.0),
        "logits_scaling": options.number("logit_scale"),
    }


def _gemma(options: Options) -> dict[str, Any]:
    """Of Gemma 2 and 3: queries are times heads' widths ** -0.5, but in the largest of each. A cap of 0 is none."""
    is_largest = options["block_count"] in (46, 62)
    of_largest = options["embedding_length"] // options["attention.head_count"]
    return {
        "query_pre_attn_scalar": of_largest if is_largest else options.head_width(),
        "attn_logit_softcapping": options.get("attn_logit_softcapping") or None,
        "final_logit_softcapping": options.get("final_logit_softcapping") or None,
    }


def _alternating(options: Options, period: int) -> list[str]:
    """Every `period`th layer sees everything."""
    windows = options.of_layers("attention.sliding_window_pattern")
    if windows is None:
        period = options.count("attention.sliding_window_pattern", period)
        windows = [(layer + 1) % period for layer in range(options["block_count"])]
    return ["sliding_attention" if has_window else "full_attention" for has_window in windows]


def _gemma2(options: Options) -> dict[str, Any]:
    return _gemma(options) | {
        "attn_logit_softcapping": options.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": options.number("final_logit_softcapping", 30.0),
        "sliding_window": options.count("attention.sliding_window", 4096),
        "layer_types": _alternating(options, 2),
    }


def _gemma3(options: Options) -> dict[str, Any]:
    layers, window = options["block_count"], options.get("attention.sliding_window")
    local = {"rope_type": "default", "rope_theta": options.number("rope.freq_base_swa", 10_000.0)}
    rope = _rope(options, options.count("attention.key_length"))
    return _gemma(options) | {
        "sliding_window": window or options["context_length"],  # of no layer then
        "layer_types": _alternating(options, 6) if window else ["full_attention"] * layers,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _phi3(options: Options) -> dict[str, Any]:
    original = options.count("rope.scaling.original_context_length", options.count("context_length"))
    return {
        "sliding_window": options.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


def _gpt_oss(options: Options) -> dict[str, Any]:
    count, used = _counts(options)
    rope = _rope(options, options.head_width())
    return {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": options.count("expert_feed_forward_length"),
        "sliding_window": options.count("attention.sliding_window"),
        "layer_types": _alternating(options, 2),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def _exaone4(options: Options) -> dict[str, Any]:
    """Windows in three of four layers, and positions in these alone; or neither."""
    window = options.get("attention.sliding_window")
    layers = _alternating(options, 4) if window else ["full_attention"] * options["block_count"]
    return {
        "sliding_window": window and options.count("attention.sliding_window"),
        "sliding_window_pattern": None,
        "layer_types": layers,
    }


def _olmoe(options: Options) -> dict[str, Any]:
    count, used = _counts(options)
    return {"num_experts": count, "num_experts_per_tok": used, "norm_topk_prob": False}


def _granitemoe(options: Options) -> dict[str, Any]:
    count, used = _counts(options)
    return _granite(options) | {"num_local_experts": count, "num_experts_per_tok": used}


def _lfm2(options: Options) -> dict[str, Any]:
    heads = options.of_layers("attention.head_count_kv") or [1] * options["block_count"]
    return {
        "norm_eps": options.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": options.count("shortconv.l_cache"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "block_auto_adjust_ff_dim": False,
    }


def _smollm3(options: Options) -> dict[str, Any]:
    turns = [
        int((layer + 1) % 4 != 0) for layer in range(options["block_count"])
    ]  # every fourth has no positions
    return _biases(options) | {"no_rope_layers": turns, "use_sliding_window": False}


ARCHITECTURES = {
    "llama": Architecture(
        model_type=lambda options: "mixtral" if options.get("expert_count") else "llama",
        config=_llama,
        paired=PAIRED,
        frequencies=FREQUENCIES[:1],
    ),
    "qwen2": Architecture(model_type="qwen2", config=lambda options: {"use_sliding_window": False}),
    "qwen3": Architecture(model_type="qwen3", config=lambda o: _biases(o) | {"use_sliding_window": False}),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        config=lambda options: _experts(options) | {
            "shared_expert_intermediate_size": options.count("expert_shared_feed_forward_length"),
            "norm_topk_prob": False, "use_sliding_window": False,
        },
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        config=lambda o: _experts(o) | _biases(o) | {"norm_topk_prob": True, "use_sliding_window": False},
    ),
    "gemma": Architecture(model_type="gemma", norms_are_one_more=True),
    "gemma2": Architecture(model_type="gemma2", config=_gemma2, names=AROUND_FFN, norms_are_one_more=True),
    "gemma3": Architecture(model_type="gemma3_text", config=_gemma3, names=AROUND_FFN, norms_are_one_more=True),
    "phi3": Architecture(
        model_type="phi3", config=_phi3, names={"ffn_up": "mlp.gate_up_proj"}, frequencies=FREQUENCIES[1:],
        turns_parts=True,
    ),
    "granite": Architecture(model_type="granite", config=_granite, paired=PAIRED),
    "gpt-oss": Architecture(
        model_type="gpt_oss", config=_gpt_oss,
        names={"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        bare={"attn_sinks": "self_attn.sinks"}, experts_alternate=True,
    ),
    "seed_oss": Architecture(
        model_type="seed_oss",
        config=lambda o: _biases(o) | {"attention_out_bias": o.has("blk.0.attn_output.bias")},
        names={"post_attention_norm": "post_attention_layernorm"},
    ),
    "ernie4_5": Architecture(
        model_type="ernie4_5", config=lambda options: {"use_bias": options.has("blk.0.attn_q.bias")}
    ),
    "hunyuan-dense": Architecture(
        model_type="hunyuan_v1_dense", config=_biases,
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "exaone4": Architecture(
        model_type="exaone4", config=_exaone4, names=BEHIND_HALVES, frequencies=FREQUENCIES[:1]
    ),
    "glm4": Architecture(
        model_type="glm4", config=_biases, turns_parts=True,
        names={
            "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "arcee": Architecture(model_type="arcee", config=_biases, paired=PAIRED, frequencies=FREQUENCIES[:1]),
    "olmoe": Architecture(model_type="olmoe", config=_olmoe),
    "granitemoe": Architecture(
        model_type="granitemoe", config=_granitemoe, paired=PAIRED, experts="block_sparse_moe.experts",
        names={"ffn_gate_inp": "block_sparse_moe.router"},
    ),
    "lfm2": Architecture(
        model_type="lfm2", config=_lfm2, has_other_layers=True,
        whole={"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
        names={
            "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
        },
    ),
    "olmo2": Architecture(model_type="olmo2", config=_biases, names=BEHIND_HALVES),
    "smollm3": Architecture(model_type="smollm3", config=_smollm3, paired=PAIRED),
}  # fmt: skip
