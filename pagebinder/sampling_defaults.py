"""How the makers of a model mean its tokens to be chosen: what generation_config.json, or a GGUF file, says of it.

transformers' `generate` takes these values where a call does not say others. An engine takes what a request says;
`CompiledModel.sampling_params`, the HTTP server and `pagebinder generate` begin with these. What such a file asks for
beyond them, and values that nothing can be sampled with, are left out and said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagebinder.errors import RequestError
from pagebinder.sampling_params import SamplingParams

# Names are those of SamplingParams. The first are about drawing, which a config may say is not meant.
OF_DRAWING = ("temperature", "top_k", "top_p", "min_p")
PENALTY, SUPPRESSED = "repetition_penalty", "suppress_tokens"
IN_GGUF = {
    "temperature": "general.sampling.temp", "top_k": "general.sampling.top_k", "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p", PENALTY: "general.sampling.penalty_repeat",
    SUPPRESSED: "tokenizer.ggml.suppress_tokens",
}  # fmt: skip
# Options of transformers that change tokens, and the value that changes none.
NOT_SERVED = {
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "bad_words_ids": None, "force_words_ids": None,
    "sequence_bias": None, "begin_suppress_tokens": None, "min_length": 0, "min_new_tokens": 0, "stop_strings": None,
    "exponential_decay_length_penalty": None, "guidance_scale": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "top_h": None, "num_beams": 1, "penalty_alpha": 0.0, "watermarking_config": None,
}  # fmt: skip


@dataclass(frozen=True)
class SaidOfSampling:
    """`defaults`: arguments of SamplingParams. `notes`: what is left out."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def said_by_config(said: Mapping[str, Any], where: str, vocab_size: int) -> SaidOfSampling:
    """Options of a generation config. `where`: for notes."""
    found = {name: said.get(name) for name in (*OF_DRAWING, PENALTY, SUPPRESSED)}
    if said.get("do_sample") is False:
        found |= dict.fromkeys(OF_DRAWING) | {"temperature": 0.0}
    other = [name for name, neutral in NOT_SERVED.items() if _says_something(said.get(name), neutral)]
    return _checked(found, other, where, vocab_size)


def said_by_gguf(options: Mapping[str, Any], where: str, vocab_size: int) -> SaidOfSampling:
    """The same of the options of a GGUF file."""
    found = {name: options.get(key) for name, key in IN_GGUF.items()}
    other = [key for key in options if key.startswith("general.sampling.") and key not in IN_GGUF.values()]
    return _checked(found, other, where, vocab_size)


def _says_something(value: Any, neutral: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value) and value != neutral
    return True


def _checked(found: Mapping[str, Any], other: list[str], where: str, vocab_size: int) -> SaidOfSampling:
    plain, defaults, notes = SamplingParams(), {}, []
    if other:
        notes.append(
            f"{where} asks for {', '.join(other)}, which is not served: other tokens than there may come."
        )
    for name, value in found.items():
        if value is None:
            continue
        try:
            value = _tokens(value, vocab_size) if name == SUPPRESSED else _number(name, value)
            value = getattr(SamplingParams(**{name: value}), name)
        except (RequestError, TypeError, ValueError) as error:
            notes.append(f"{where}: {name} is left out: {error}")
            continue
        if value != getattr(plain, name):
            defaults[name] = value
    return SaidOfSampling(defaults, tuple(notes))


def _number(name: str, value: Any) -> Any:
    if name != "top_k":
        return value
    return 0 if value == -1 else int(value) if isinstance(value, float) and value.is_integer() else value


def _tokens(value: Any, vocab_size: int) -> list[int]:
    """Of a list, a tensor or an array: those that there are; not all of them. Raises TypeError, ValueError."""
    tokens = sorted({int(token) for token in value if 0 <= int(token) < vocab_size})
    if len(tokens) == vocab_size:
        raise ValueError("no token would be left")
    return tokens


def described(defaults: Mapping[str, Any]) -> str:
    """ "temperature 0.6, top_k 20"; of tokens that are never chosen how many there are."""
    parts = [f"{name} {value:g}" for name, value in defaults.items() if name != SUPPRESSED]
    if tokens := defaults.get(SUPPRESSED):
        parts.append(f"{len(tokens):,} tokens never")
    return ", ".join(parts)
