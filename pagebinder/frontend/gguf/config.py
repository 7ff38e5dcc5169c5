"""What a GGUF file says of its model -> a config of transformers.

Keys are "ARCHITECTURE.name". Each one must be known: one that nothing reads could mean another model, so it is an
error, as is one that a model needs and the file lacks. Where llama.cpp's code knows what files do not say (which
layers of Gemma have windows), the same is said in the architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagebinder.errors import CheckpointError
from pagebinder.frontend.gguf.architecture import architecture_of
from pagebinder.frontend.gguf.file import GgufFile
from pagebinder.frontend.gguf.options import Options, rope_of


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
    if options.num_layers > len(layers):
        raise CheckpointError(
            f"{file.path} says that it has {options.num_layers:,} layers, and holds tensors of {len(layers)}."
        )
    common = _common(options, architecture.turns_parts)
    said = {name: say() for name, say in common.items() if name not in architecture.own}
    said |= architecture.config(options)
    options.check_all_read()
    kind = architecture.model_type
    model_type = kind if isinstance(kind, str) else kind(options)
    try:
        return AutoConfig.for_model(model_type, **said)
    except Exception as error:
        raise CheckpointError(
            f"{file.path} describes no {model_type} that transformers takes: {error}"
        ) from error


def _common(options: Options, turns_parts: bool) -> dict[str, Callable[[], Any]]:
    """What most architectures say alike."""
    return {
        "vocab_size": lambda: options.file.tensors["token_embd.weight"].shape[0],
        "hidden_size": lambda: options.count("embedding_length"),
        "intermediate_size": lambda: options.count("feed_forward_length"),
        "num_hidden_layers": lambda: options.num_layers,
        "num_attention_heads": lambda: options.count("attention.head_count"),
        "num_key_value_heads": lambda: options.count(
            "attention.head_count_kv", options.count("attention.head_count")
        ),
        "head_dim": lambda: _head_width(options),
        "max_position_embeddings": lambda: options.count("context_length"),
        "rms_norm_eps": lambda: options.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": lambda: rope_of(options, options.head_width(), turns_parts),
        "tie_word_embeddings": lambda: not options.has("output.weight"),
        "pad_token_id": lambda: None,
        "dtype": lambda: _dtype(options.file),
    }


def _head_width(options: Options) -> int:
    head = options.head_width()
    if options.get("attention.value_length", head) != head:
        options.refuse("attention.value_length")
    return head


def _dtype(file: GgufFile) -> str:
    """That of matrices if they are plain, else bfloat16."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    kinds = kinds - {"F32"} or kinds  # routers are in float32 whatever the others are
    plain = {"F32": "float32", "F16": "float16"}
    return plain.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"
