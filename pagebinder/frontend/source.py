"""Where a model comes from: a module object, or a local checkpoint directory.

Both become a `ModelSource`: the module to trace, how to call it, and the facts the engine needs
(vocabulary, length, end-of-sequence tokens, tokenizer).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pagebinder.errors import CheckpointError, ConfigError
from pagebinder.frontend import stored_loading
from pagebinder.frontend.checkpoint_tensors import (
    CheckpointTensors,
    compared,
    refuse_unsaid_codes,
    refuse_unsaid_words,
)
from pagebinder.frontend.config_fields import check_fields
from pagebinder.frontend.dtypes import convert, is_in, widen_kept
from pagebinder.frontend.model_kinds import SENTENCE_MODULES, auto_class, is_encoder_only, text_config
from pagebinder.frontend.module_copy import copied
from pagebinder.frontend.stored_format import stored_weights, with_modelopt_options
from pagebinder.frontend.text_writer import KEY_MAPPING, other_parts, writer_config, writer_of
from pagebinder.frontend.unreadable import refuse_unreadable
from pagebinder.frontend.unsupported import refuse_head
from pagebinder.frontend.wrappers import is_transformers, said_inside, unwrapped
from pagebinder.paths import user_path
from pagebinder.report import PassResult
from pagebinder.sampling_defaults import SaidOfSampling, said_by_config

DEFAULT_MAX_MODEL_LEN = 2048
WEIGHT_PATTERNS = ("*.safetensors",)
GENERATION = "generation_config.json"
ARTEFACT = "artefact.json"  # what `save` of compiled models writes in place of a config.json
# What configs call layers that mix tokens by a recurrence or a short convolution, and have no attention;
RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "mamba", "conv", "recurrent"})
# layers that have both, side by side or one after the other; and layers that mix no tokens.
HYBRID_LAYER_TYPES = frozenset({"hybrid", "hybrid_sliding"})
LAYER_TYPES_WITHOUT_MIXING = frozenset({"moe", "mlp"})
# Families without any attention whose configs have no layer types.
RECURRENT_MODEL_TYPES = frozenset({"rwkv", "xlstm"})
# Families whose layers attend more than once: DiffLlama to each half of the values.
ATTENTIONS_PER_LAYER = {"diffllama": 2}


@dataclass(frozen=True, kw_only=True)
class EncoderFacts:
    """What an encoder-decoder adds to the facts of its decoder.

    `vocab_size`: ids of an encoder prompt, `max_len`: its most tokens. `decoder_start_token_id`: what the decoder's
    prompt begins with.
    """

    vocab_size: int
    max_len: int
    num_attention_layers: int | None
    decoder_start_token_id: int | None


@dataclass(kw_only=True)
class ModelSource:
    """A decoder ready to be captured. `is_transformers` models are called by keyword and return `.logits`.

    Of an encoder-decoder, `encoder` holds the encoder's facts, and the other fields mean its decoder.
    `path`: the directory that it came from. `file`: of a model in one file, which holds its tokenizer, too.
    `stored_weights`: of a checkpoint in 8 or 4 bits, which layers keep its codes, for the report.
    `sampling`: what its makers said of it, see `sampling_defaults.py`.
    `tensors`: what a checkpoint lacks, and what it has beyond the model. `other_parts`: configs beside the module's,
    of a model that only holds it and parts that write no text. `says_length`: False if max_model_len is our default.
    """

    module: torch.nn.Module
    name: str
    is_transformers: bool
    vocab_size: int
    max_model_len: int
    num_attention_layers: int | None
    says_length: bool = True
    num_recurrent_layers: int = 0
    encoder: EncoderFacts | None = None
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    sampling: SaidOfSampling = field(default_factory=SaidOfSampling)
    path: Path | None = None
    file: Path | None = None
    config: Any = None
    stored_weights: PassResult | None = None
    tensors: CheckpointTensors = field(default_factory=CheckpointTensors)
    other_parts: tuple[str, ...] = ()
    _tokenizer: Any = field(default=None, repr=False)

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Arguments of SamplingParams."""
        return self.sampling.defaults

    @property
    def encoder_only(self) -> bool:
        """Is it an encoder without a decoder (BERT), which has rows of output and generates nothing?"""
        return self.is_transformers and is_encoder_only(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's floating-point parameters (of the first, if they differ)."""
        for parameter in self.module.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
        return torch.float32

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def tokenizer(self):
        """The checkpoint's tokenizer (transformers' fast tokenizer), or None if it has none."""
        if self._tokenizer is None and self.path is not None and (self.path / "tokenizer.json").exists():
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(str(self.path), local_files_only=True)
            except Exception as error:
                raise CheckpointError(f"{self.path}/tokenizer.json cannot be read: {error}") from error
        return self._tokenizer


def source_from_module(module: torch.nn.Module, *, dtype: torch.dtype | None = None) -> ModelSource:
    """Describe a module that the user built. With `dtype`, a converted copy is compiled; theirs stays as it is."""
    module = unwrapped(module)
    refuse_unreadable(module)
    beside = other_parts(getattr(module, "config", None))
    module = writer_of(module)
    if dtype is not None and not is_in(module, dtype):
        module = convert(copied(module), dtype)
    config = said_inside(module, "config")
    return ModelSource(
        module=module, name=type(module).__name__, is_transformers=is_transformers(module), config=config,
        other_parts=beside, **facts_of(config, module),
    )  # fmt: skip


def source_from_dir(path, *, dtype: torch.dtype | None = None, weights: bool = True) -> ModelSource:
    """Load a local checkpoint directory (config.json + safetensors) as transformers builds it.

    Args:
        dtype: None takes the checkpoint's.
        weights: False builds the model on the meta device from config.json alone (for `explain`).
    Raises:
        CheckpointError: no such directory, no or bad config.json, no or bad weights, an artefact.
        CaptureError: its model neither writes nor embeds texts.
    """
    path = user_path(path, CheckpointError)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a directory. Give a local checkpoint directory with a config.json."
        )
    config_path = path / "config.json"
    if not config_path.exists():
        if (path / ARTEFACT).exists():
            raise CheckpointError(
                f"{path} is an artefact, which is compiled already: give the checkpoint that it was compiled from. "
                "pagebinder.load(dir).explain() returns its report, `pagebinder compile DIR` prints it."
            )
        if (path / "adapter_config.json").exists():
            raise CheckpointError(
                f"{path} holds a peft adapter without its base model. Compile what "
                "peft.AutoPeftModelForCausalLM.from_pretrained(dir) returns, or put the adapter's files into the "
                "directory of the base model."
            )
        raise CheckpointError(f"{path} has no config.json, so it is not a checkpoint directory.")
    try:
        config_dict = json.loads(config_path.read_text())
    except OSError as error:
        raise CheckpointError(f"{config_path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{config_path} is not valid JSON: {error}") from error
    if not isinstance(config_dict, dict):
        raise CheckpointError(
            f"{config_path} holds a {type(config_dict).__name__}, not the options of a model."
        )
    check_fields(config_dict, config_path)
    ends, bos, generation = generation_options(path)
    config = _read_config(path, config_dict)
    if not (path / SENTENCE_MODULES).exists():
        for name in (getattr(config, "architectures", None) or ())[:1]:
            refuse_head(name)
    module, of_weights = _build(path, config, config_dict, dtype, weights)
    facts = facts_of(module.config, module)
    if ends is not None:
        facts["eos_token_ids"] = frozenset(t for t in ends if 0 <= t < facts["vocab_size"])
    if bos is not None:
        facts["bos_token_id"] = bos
    facts["sampling"] = said_by_config(generation, f"{path / GENERATION}", facts["vocab_size"])
    return ModelSource(
        module=module, name=str(path), is_transformers=True, path=path, config=module.config,
        other_parts=other_parts(config), **of_weights, **facts,
    )  # fmt: skip


def source_from_config(config, *, dtype: torch.dtype | None = None) -> ModelSource:
    """A transformers config object -> the model it describes, on the meta device (no memory, no weights)."""
    from transformers import PretrainedConfig

    if not isinstance(config, PretrainedConfig):
        raise ConfigError(
            f"Give a checkpoint directory or a transformers config, not {type(config).__name__}."
        )
    try:
        with torch.device("meta"):
            writer = writer_config(config)
            dtype = dtype or config.dtype or torch.float32
            module = auto_class(writer).from_config(writer, dtype=dtype)
            widen_kept(module, dtype)
    except ValueError as error:
        raise ConfigError(
            f"transformers has no language model for {type(config).__name__}: {error}"
        ) from error
    except KeyError as error:
        raise ConfigError(
            f"transformers cannot build a model from this {type(config).__name__}: it names {error}, which is not "
            "known there (an activation, a kind of RoPE, of layers, ...)."
        ) from error
    except Exception as error:
        raise ConfigError(
            f"transformers cannot build a model from this {type(config).__name__}; its sizes may contradict each "
            f"other: {str(error).splitlines()[0]}"
        ) from error
    return replace(source_from_module(module.eval()), other_parts=other_parts(config))


def _read_config(path: Path, config_dict: dict):
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        kind = config_dict.get("model_type")
        reason = str(error).split("\n\n")[0]  # transformers adds paragraphs of advice on installing it
        raise CheckpointError(f"{path}/config.json (model_type {kind!r}) cannot be read: {reason}") from error


def _stored_by_class(config, path: Path):
    """What the class of a config adds to a config.json that is silent: Inkling 2 is published so."""
    added = getattr(config, "quantization_config", None)
    options = added if isinstance(added, dict) or added is None else added.to_dict()
    return stored_weights({"quantization_config": options}, f"{path}/config.json ({type(config).__name__})")


def _build(
    path: Path, config, config_dict: dict, dtype: torch.dtype | None, weights: bool
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model, and the fields of its source that are about weights."""
    said = with_modelopt_options(config_dict, path)
    stored = stored_weights(said, f"{path}/config.json") or _stored_by_class(config, path)
    writer = writer_config(config)
    if stored is not None and writer is not config:
        raise CheckpointError(
            f"{path} keeps weights of a {config.model_type} in 8 or 4 bits; of a model that is made of parts, plain "
            "weights are read."
        )
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    if not weights:
        module = source_from_config(config, dtype=dtype).module
        if stored is None:
            return module, {}
        return module, {"stored_weights": stored_loading.replaced_on_meta(module, stored)}
    if not any(list(path.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise CheckpointError(
            f"{path} has no *.safetensors file. Save the weights as safetensors "
            "(transformers: model.save_pretrained(dir)), or use `pagebinder explain`, which needs no weights."
        )
    for file in (file for pattern in WEIGHT_PATTERNS for file in path.glob(pattern)):
        try:
            file.open("rb").close()
        except OSError as error:  # of which safetensors says that there is no such file
            raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    options = {} if writer is config else {"config": writer, "key_mapping": KEY_MAPPING}
    if stored is None and said.get("quantization_config"):  # of a cache alone
        config.__dict__.pop("quantization_config", None)
        options = {"config": config} | options
    if stored is not None:
        config.quantization_config = stored_loading.loading_options(stored, path)
        stored = config.quantization_config["stored"]  # with what the files say
        options = {"config": config}
    try:
        module, info = auto_class(writer, path).from_pretrained(
            str(path),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `compared` names them
            **options,
        )
    except Exception as error:
        reason = next(iter(stored_loading.failures), error) if stored is not None else error
        raise CheckpointError(f"The weights in {path} cannot be loaded: {reason}") from error
    if stored is None:
        refuse_unsaid_words(info.get("unexpected_keys", ()), path)
    else:
        stored_loading.check_names(
            stored, info.get("unexpected_keys", ()), info.get("missing_keys", ()), path
        )
    tensors = compared(module, info, path, other_parts(config))
    if stored is None:
        refuse_unsaid_codes(module, tensors, path)
        return module.eval(), {"tensors": tensors}
    result = stored_loading.finish(module, stored)
    absent = tensors.absent | {f"{name.removesuffix('.weight')}.codes" for name in tensors.absent}
    left_over = stored_loading.check_left_over(result, tensors.left_over, path)
    return module.eval(), {"stored_weights": result, "tensors": CheckpointTensors(absent, left_over)}


def facts_of(config, module: torch.nn.Module) -> dict[str, Any]:
    """What the engine needs to know, from the config if there is one, else from the module."""
    text = text_config(config)
    vocab_size = configured_vocab_size(config)
    if vocab_size is None:  # known when the module is captured, see `plain_modules.py`
        embedding = next((m for m in module.modules() if isinstance(m, torch.nn.Embedding)), None)
        vocab_size = 1 if embedding is None else embedding.num_embeddings
    encoder_decoder = _encoder_facts(config, module)
    vocab_size = encoder_decoder.get("vocab_size", vocab_size)
    length = _max_model_len(text)
    return {
        "vocab_size": vocab_size,
        "max_model_len": length or DEFAULT_MAX_MODEL_LEN,
        "says_length": length is not None,
        **_layer_counts(text),
        **encoder_decoder,
        "eos_token_ids": end_tokens(config, module, vocab_size),
        "bos_token_id": getattr(text, "bos_token_id", None),
        "sampling": _said_of_sampling(module, vocab_size),
    }


def _said_of_sampling(module: torch.nn.Module, vocab_size: int) -> SaidOfSampling:
    said = said_inside(module, "generation_config")
    if said is None:
        return SaidOfSampling()
    return said_by_config(vars(said), f"The generation_config of {type(module).__name__}", vocab_size)


def configured_vocab_size(config) -> int | None:
    """How many token ids a config says there are."""
    return getattr(text_config(config), "vocab_size", None)


def end_tokens(config, module: torch.nn.Module, vocab_size: int) -> frozenset[int]:
    """The ids that end a sequence: those of the generation config, none if it says none; without one, the config's.

    transformers makes a generation config of the config when it builds a model, and reads that one alone.
    """
    said = said_inside(module, "generation_config")
    eos = getattr(text_config(config) if said is None else said, "eos_token_id", None)
    return frozenset(t for t in as_ids(eos) if 0 <= t < vocab_size)


def as_ids(eos: Any) -> list[int]:
    """An id, several in a list or a tensor, or None."""
    if isinstance(eos, torch.Tensor):
        return eos.flatten().tolist()
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _max_model_len(config) -> int | None:
    lengths = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((length for length in lengths if length), None)


def _layer_counts(config) -> dict[str, Any]:
    """How many layers mix tokens by attention and how many by a recurrence; a config without types has one kind."""
    num_layers = getattr(config, "num_hidden_layers", None)
    if getattr(config, "is_decoder", False):  # a decoder cut out of a family of encoder-decoders
        num_layers = getattr(config, "decoder_layers", num_layers)
    types = getattr(config, "layer_types", None)
    model_type = getattr(config, "model_type", None)
    if types is None and model_type == "recurrent_gemma":  # of transformers 5.17
        types = config.layers_block_type
    if model_type in ATTENTIONS_PER_LAYER:
        return {
            "num_attention_layers": num_layers * ATTENTIONS_PER_LAYER[model_type],
            "num_recurrent_layers": 0,
        }
    if types is None:
        if model_type in RECURRENT_MODEL_TYPES:
            return {"num_attention_layers": 0, "num_recurrent_layers": num_layers}
        return {"num_attention_layers": num_layers, "num_recurrent_layers": 0}
    no_attention = sum(t in RECURRENT_LAYER_TYPES | LAYER_TYPES_WITHOUT_MIXING for t in types)
    num_recurrent = sum(t in RECURRENT_LAYER_TYPES | HYBRID_LAYER_TYPES for t in types)
    num_attention = None if num_layers is None else num_layers - no_attention
    return {"num_attention_layers": num_attention, "num_recurrent_layers": num_recurrent}


def _encoder_facts(config, module: torch.nn.Module) -> dict[str, Any]:
    """The fields in which an encoder-decoder differs: a config's num_hidden_layers are those of its encoder."""
    if not (is_transformers(module) and getattr(config, "is_encoder_decoder", False)):
        return {}
    encoder, decoder = _of_both_halves(config)
    told = _first(decoder, "max_position_embeddings", "n_positions")
    source_length = _first(encoder, "max_source_positions", "max_position_embeddings", "n_positions")
    return {
        "vocab_size": _first(decoder, "decoder_vocab_size", "vocab_size"),
        "encoder": EncoderFacts(
            vocab_size=_first(encoder, "vocab_size"),
            max_len=source_length or DEFAULT_MAX_MODEL_LEN,
            num_attention_layers=_first(encoder, "encoder_layers", "num_layers", "num_hidden_layers"),
            decoder_start_token_id=_decoder_start(config, module),
        ),
        "max_model_len": _first(decoder, "max_target_positions") or told or DEFAULT_MAX_MODEL_LEN,
        "says_length": (_first(decoder, "max_target_positions") or told) is not None,
        "num_attention_layers": _first(decoder, "decoder_layers", "num_decoder_layers", "num_hidden_layers"),
    }


def _of_both_halves(config) -> tuple[Any, Any]:
    """The configs of encoder and decoder: of T5Gemma one each, of BART twice the same."""
    from transformers import PretrainedConfig

    halves = getattr(config, "encoder", None), getattr(config, "decoder", None)
    if all(isinstance(half, PretrainedConfig) for half in halves):
        return halves
    text = text_config(config)
    return text, text


def _first(config, *names: str):
    return next((v for v in (getattr(config, name, None) for name in names) if v is not None), None)


def _decoder_start(config, module: torch.nn.Module) -> int | None:
    """As in transformers' `generate`: the generation config's token, else the config's, else what begins a text."""
    said, name = getattr(module, "generation_config", None), "decoder_start_token_id"
    token = _first(said, name)
    token = _first(config, name) if token is None else token
    return _first(said, "bos_token_id") if token is None else token


def read_options(file: Path, what: str) -> dict:
    """The JSON object in a file, {} where there is none. Raises CheckpointError: it holds something else."""
    if not file.exists():
        return {}
    try:
        options = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(options, dict):
        raise CheckpointError(f"{file} holds a {type(options).__name__}, not {what}.")
    return options


def generation_options(path: Path) -> tuple[frozenset[int] | None, int | None, dict[str, Any]]:
    """End-of-sequence and begin tokens of generation_config.json, None for what is not said, and all that it says.

    As in transformers, a file without eos_token_id says that no token ends a sequence.
    """
    file = path / GENERATION
    generation = read_options(file, "generation options")
    eos = generation.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(f"{file}: eos_token_id is {eos!r}; it must be a token id or a list of them.")
    return frozenset(ids) if file.exists() else None, generation.get("bos_token_id"), generation
