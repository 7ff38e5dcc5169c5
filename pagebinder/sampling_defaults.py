"""How the makers of a model mean its tokens to be chosen: what generation_config.json, or a GGUF file, says of it.

transformers' `generate` takes these values where a call does not say others. An engine takes what a request says;
`CompiledModel.sampling_params`, the HTTP server and `pagebinder generate` begin with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagebinder.errors import CheckpointError, RequestError
from pagebinder.sampling_params import MOST_PENALTY, SamplingParams

# Names are those of SamplingParams. What is drawn with has no effect where a config says do_sample=false.
OF_DRAWING = ("temperature", "top_k", "top_p", "min_p")
PENALTY, BIAS = "repetition_penalty", "logit_bias"
IN_GGUF = {
    "temperature": "general.sampling.temp", "top_k": "general.sampling.top_k", "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p", PENALTY: "general.sampling.penalty_repeat",
}  # fmt: skip
SUPPRESSED_IN_GGUF = "tokenizer.ggml.suppress_tokens"


def defaults_of_config(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options of a generation config -> arguments of SamplingParams. `where`: for messages.

    Raises:
        CheckpointError: a value that nothing can be sampled with.
    """
    names = (PENALTY,) if said.get("do_sample") is False else (*OF_DRAWING, PENALTY)
    return _checked({name: said.get(name) for name in names}, said.get("suppress_tokens"), where)


def defaults_of_gguf(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same of the options of a GGUF file."""
    found = {name: options.get(key) for name, key in IN_GGUF.items()}
    return _checked(found, options.get(SUPPRESSED_IN_GGUF), where)


def _checked(found: Mapping[str, Any], suppressed: Any, where: str) -> dict[str, Any]:
    values = {name: value for name, value in found.items() if value is not None}
    if values.get("top_k") == -1:  # off, as others write it
        values["top_k"] = 0
    try:
        if suppressed:
            values[BIAS] = dict.fromkeys(suppressed, -MOST_PENALTY)
        params = SamplingParams(**values)
    except (RequestError, TypeError) as error:
        raise CheckpointError(f"{where} says how tokens are sampled: {error}") from error
    plain = SamplingParams()
    return {name: getattr(params, name) for name in values if getattr(params, name) != getattr(plain, name)}


def described(defaults: Mapping[str, Any]) -> str:
    """ "temperature 0.6, top_k 20"; of tokens that are never chosen how many there are."""
    parts = [f"{name} {value:g}" for name, value in defaults.items() if name != BIAS]
    if bias := defaults.get(BIAS):
        parts.append(f"{len(bias):,} tokens never")
    return ", ".join(parts)
