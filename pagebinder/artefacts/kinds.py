"""What artefacts hold of a decoder or encoder-decoder, and what of an encoder alone; and the way back.

kind       graph that answers    facts beside those of every artefact
decoder    fused                 KV plan, states, longest sequence
encoder    packed                states, longest sequence, numbering of positions, recipe of its embeddings
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagebinder.artefacts.values import to_json
from pagebinder.compiled_encoder import CompiledEncoder
from pagebinder.compiled_model import CompiledModel
from pagebinder.runtime.encoder_batches import batches
from pagebinder.runtime.executables import Executable
from pagebinder.runtime.single_sequence import single_sequence_inputs

# Tokens of the sequence on which a program is compared with its executable.
TRIAL_TOKENS = 5
TRIAL_ENCODER_TOKENS = 4

Compiled = CompiledModel | CompiledEncoder


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`main`: the level of the graph that answers. `facts`: JSON-ready. `trial_inputs`: for one short sequence and
    the graph of a level, the same at each call. `restore`: from a manifest's facts, with a reader of its values, what
    every compilation has, and the executables by level."""

    name: str
    main: str
    facts: Callable[[Any], dict[str, Any]]
    trial_inputs: Callable[[Any, str], dict[str, torch.Tensor]]
    restore: Callable[
        [Mapping, Callable[[str], Any], dict[str, Any], Mapping[str, Executable]],
        CompiledModel | CompiledEncoder,
    ]


def _decoder_facts(compiled: CompiledModel) -> dict[str, Any]:
    return {
        "plan": to_json(compiled.kv_spec),
        "max_model_len": compiled.max_model_len,
        "uncounted_id": compiled.uncounted_id,
    }


def _decoder_inputs(compiled: CompiledModel, level: str) -> dict[str, torch.Tensor]:
    if level == "encoder":
        ids = _ids(compiled.source.encoder.vocab_size, TRIAL_ENCODER_TOKENS)
        return {"input_ids": ids, "positions": torch.arange(len(ids), device="cpu")}
    ids = _ids(compiled.source.vocab_size, min(TRIAL_TOKENS, compiled.max_model_len))
    states = None
    if compiled.source.encoder is not None:
        states = compiled.encode(_ids(compiled.source.encoder.vocab_size, TRIAL_ENCODER_TOKENS))
    return single_sequence_inputs(compiled.kv_spec, compiled.states, ids, encoder_states=states)


def _restored_decoder(
    manifest: Mapping,
    value: Callable[[str], Any],
    common: dict[str, Any],
    executables: Mapping[str, Executable],
) -> CompiledModel:
    return CompiledModel(
        **common,
        kv_spec=value("plan"),
        max_model_len=manifest["max_model_len"],
        executable=executables["fused"],
        encoder_executable=executables.get("encoder"),
        uncounted_id=manifest["uncounted_id"],
    )


def _encoder_facts(compiled: CompiledEncoder) -> dict[str, Any]:
    return {
        "truncation_side": getattr(compiled.source.tokenizer(), "truncation_side", "right"),
        "max_tokens": compiled.max_tokens,
        "numbering": to_json(compiled.numbering),
        "recipe": to_json(compiled.recipe),
        "has_head": compiled.has_head,
    }


def _encoder_inputs(compiled: CompiledEncoder, level: str) -> dict[str, torch.Tensor]:
    ids = _ids(compiled.source.vocab_size, min(TRIAL_TOKENS, compiled.max_tokens)).tolist()
    (batch,) = batches([ids], len(ids), compiled.device)
    return batch.inputs


def _restored_encoder(
    manifest: Mapping,
    value: Callable[[str], Any],
    common: dict[str, Any],
    executables: Mapping[str, Executable],
) -> CompiledEncoder:
    return CompiledEncoder(
        **common,
        max_tokens=manifest["max_tokens"],
        numbering=value("numbering"),
        recipe=value("recipe"),
        has_head=manifest["has_head"],
        executable=executables["packed"],
    )


def _ids(vocab_size: int, num_tokens: int) -> torch.Tensor:
    return torch.arange(1, num_tokens + 1, device="cpu") % vocab_size


DECODER = Kind(
    name="decoder",
    main="fused",
    facts=_decoder_facts,
    trial_inputs=_decoder_inputs,
    restore=_restored_decoder,
)
ENCODER = Kind(
    name="encoder",
    main="packed",
    facts=_encoder_facts,
    trial_inputs=_encoder_inputs,
    restore=_restored_encoder,
)
KINDS = {kind.name: kind for kind in (DECODER, ENCODER)}


def kind_of(compiled: Compiled) -> Kind:
    return ENCODER if isinstance(compiled, CompiledEncoder) else DECODER
