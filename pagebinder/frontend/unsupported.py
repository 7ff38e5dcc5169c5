"""Architectures that relate tokens in a way that no op here computes, told from their modules before the tracing.

Without this they are refused, too, but by whatever their code does first when it is traced: an error about None, or
a list of thirty ops. Each trait is something that only such modules have (a submodule, an attribute, a method), and
its reason is what the module's forward does, in transformers 5.23. A model without a trait is left to the capture.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.model_kinds import is_headless

JUDGES = (
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
NO_OP = "no op here does that yet"
# Modules whose index a leaf traces as an op.
INDEX_IN_LEAF = (
    "AXK2Attention",
    "DeepseekV32Attention",
    "DeepseekV4CSACompressor",
    "Dots3NoteTextAttention",
    "Glm5NextTextAttention",
    "GlmMoeDsaAttention",
    "HYV4Attention",
    "HYV4VLAttention",
    "MistralLarge4TextAttention",
    "Qwen4ExpTextAttention",
)


@dataclass(frozen=True)
class Trait:
    """`found` tells a module that has the trait; "{name} {reason}" is the refusal."""

    found: Callable[[torch.nn.Module], bool]
    reason: str


def _has(*attributes: str) -> Callable[[torch.nn.Module], bool]:
    return lambda module: all(getattr(module, name, None) is not None for name in attributes)


def _is(*classes: str) -> Callable[[torch.nn.Module], bool]:
    """For modules whose attributes are as those of others, that are served."""
    return lambda module: type(module).__name__ in classes


def _has_submodule(name: str) -> Callable[[torch.nn.Module], bool]:
    return lambda module: isinstance(module._modules.get(name), torch.nn.Module)


def _reads_the_last_loop(config) -> bool:
    is_so = getattr(config, "recurrent_kv_cache_mode", None) == "last_loop"
    return (
        is_so and getattr(config, "n_recurrent_loops", 2) > 1 and getattr(config, "n_recurrent_layers", 1) > 0
    )


# The first that is found is told.
TRAITS = (
    Trait(
        lambda module: _has_submodule("indexer")(module) and not _is(*INDEX_IN_LEAF)(module),
        "selects the keys that each query sees by a learned index (top-k) of a kind that is not known here",
    ),
    Trait(
        lambda module: _reads_the_last_loop(getattr(module, "config", None)),
        "lets the earlier passes of its loop read keys and values of the last one, but only of tokens before the "
        "present step: what it computes depends on how a prompt is cut into steps. Set the config's "
        "recurrent_kv_cache_mode to per_loop",
    ),
    Trait(
        _has("patch_reduce"),
        "is part of a model that reduces bytes to patches whose lengths it finds in the bytes themselves: a graph "
        "over tokens has no rows for them",
    ),
    Trait(
        _has("_look_adjacent"),
        "attends within chunks of the whole padded sequence, of neighbours or of tokens with the same hash: no paged "
        "op for that",
    ),
    Trait(
        _has("pool_tensor"),
        "shortens the sequence between its layers by pooling neighbours, so a token has no row of its own there",
    ),
    Trait(
        _has("rel_shift", "r_r_bias"),
        "scores keys by products of the query with embeddings of the distance (Transformer-XL): paged attention has "
        "no such scores",
    ),
    Trait(
        _has("ngram", "relative_pos_embeddings"),
        "computes a stream of queries for each of the next tokens that it predicts beside the main one: a token has "
        "several rows that attend differently, and no op here does that",
    ),
    Trait(
        _has("prepare_dynamic_mask"),
        "makes a mask of the values that its keys have (dynamic mask), and beyond a length keeps the largest of it: "
        f"{NO_OP}",
    ),
    Trait(
        _has("prompt_length", "segment_embedding"),
        "puts learned prompt tokens in front of every sequence by itself, and its bias depends on segments: rows of "
        "its graph are not the tokens that it is given",
    ),
    Trait(
        _has("one_sided_attn_window_size"),
        "attends in overlapping chunks of the whole padded sequence and to global tokens that the mask chooses: "
        f"{NO_OP}",
    ),
    Trait(
        _has("block_len", "local_radius"),
        f"attends within and beside blocks of the whole padded sequence: {NO_OP}",
    ),
    Trait(
        lambda module: getattr(module, "attention_type", None) == "block_sparse",
        "attends to blocks chosen at random in long sequences, and to everything from its first short one on; set "
        "attention_type to original_full",
    ),
    Trait(_has("embed_global"), f"carries global tokens beside the sequence, which is attended in blocks: {NO_OP}"),
    Trait(
        _has("num_landmarks"),
        f"approximates attention by landmarks, which are means over segments of the sequence: {NO_OP}",
    ),
    Trait(_has("approx_mode"), f"approximates attention by blocks that it picks by their scores: {NO_OP}"),
    Trait(
        _has("use_expectation", "hash_code_len"),
        f"weighs keys by how often hashes collide, not by a softmax: {NO_OP}",
    ),
    Trait(
        _has_submodule("key_conv_attn_layer"),
        f"mixes neighbours by convolutions, one with a kernel of each token's own: {NO_OP}",
    ),
    Trait(_has("fourier_transform"), f"mixes tokens by a Fourier transform over the sequence: {NO_OP}"),
    Trait(
        lambda module: getattr(module, "trigram_input", False) is True,
        f"joins the embedding of every token with those of both neighbours: {NO_OP}",
    ),
    Trait(
        _is("T5Gemma2MergedAttention"),
        f"reads its own tokens and those of the encoder in one softmax: {NO_OP}",
    ),
    Trait(
        _is("EncoderDecoderModel"),
        "joins an encoder and a decoder that count the rows of a call, and takes no positions for either",
    ),
    Trait(
        _is("PerceiverEmbeddings"),
        "gives latents that read the whole sequence, and each output position reads the latents: the rows between "
        "are no tokens",
    ),
)  # fmt: skip


def _required_inputs(model: torch.nn.Module) -> set[str]:
    """What a model cannot be called without, beside token ids."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    return required - {"self", "input_ids", "position_ids"}


def refuse_head(name: str) -> None:
    """Raises CaptureError: a class of this name judges texts, and neither writes nor embeds them."""
    if name.endswith(JUDGES):
        raise CaptureError(
            f"{name} is not served: its head judges a text, and only heads that write text, and encoders without "
            "one, are. Compile the model below the head (save it on its own, or give model.base_model of an encoder)."
        )


def refuse_unsupported(model: torch.nn.Module) -> None:
    """Nothing, for a model without any of the traits.

    Raises:
        CaptureError: with the module and what it does; or the model has no forward at all.
    """
    if type(model).forward is torch.nn.Module.forward:
        parts = ", ".join(name for name, _ in model.named_children())
        raise CaptureError(
            f"{type(model).__name__} cannot be called: it has no forward, only parts ({parts}). Compile the one that "
            "writes text, for example compile_model(model.thinker)."
        )
    refuse_head(type(model).__name__)
    if is_headless(model):
        raise CaptureError(
            f"{type(model).__name__} returns hidden states and no logits: there is nothing to generate with. Give "
            "the model with its head (...ForCausalLM)."
        )
    if needed := sorted(_required_inputs(model)):
        raise CaptureError(
            f"{type(model).__name__} is not served: it takes {', '.join(needed)} with every call, so there is no "
            "prompt of text alone."
        )
    modules = list(model.named_modules())
    for trait in TRAITS:
        for path, module in modules:
            if trait.found(module):
                where = f" ({path})" if path else ""
                raise CaptureError(
                    f"{type(model).__name__} is not served: {type(module).__name__}{where} {trait.reason}."
                )
