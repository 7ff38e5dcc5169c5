"""What a request must be before anything changes for it: a prompt of valid tokens, parameters that fit the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral

from pagebinder.config import SamplingParams
from pagebinder.errors import RequestError

Prompt = str | Sequence[int]


def prompt_list(prompts) -> list:
    """One prompt or several (a list, or a tensor of token ids) as a list of prompts. Raises RequestError."""
    if hasattr(prompts, "tolist"):  # a tensor or an array
        prompts = prompts.tolist()
    if not isinstance(prompts, (str, Sequence)):
        raise RequestError(f"Give a prompt or a list of prompts, not {type(prompts).__name__}.")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]
    return list(prompts)


def prompt_token_ids(
    prompt: Prompt,
    tokenizer,
    vocab_size: int,
    *,
    name: str = "prompt",
    special_tokens: bool = True,
    uncounted_id: int | None = None,
) -> list[int]:
    """A prompt (text, token ids, or a 1-D tensor of them) as a list of token ids.

    `name`: what messages call it. `special_tokens`: whether text gets those that the tokenizer adds.

    Raises:
        RequestError: text without a tokenizer, no tokens, something that is not a token id, an id out of range.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                f"The {name} is text, but the model has no tokenizer: give token ids (list[int])."
            )
        check_unicode(prompt, name)
        try:
            options = {} if special_tokens else {"add_special_tokens": False}
            prompt = tokenizer(prompt, **options)["input_ids"]
        except TypeError as error:
            raise RequestError(f"The {name} cannot be tokenised: {error}") from error
    elif hasattr(prompt, "tolist"):  # a tensor or an array
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise RequestError(f"A prompt is text or a list of token ids, not {type(prompt).__name__}.")
    if len(prompt) == 0:
        raise RequestError(f"The {name} is empty: give at least one token.")
    for token in prompt:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise RequestError(f"Token ids are whole numbers; the {name} holds {token!r}.")
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"Token id {token} is out of range: the vocabulary has ids 0 to {vocab_size - 1}."
            )
        if token == uncounted_id:
            raise RequestError(
                f"The {name} holds the padding token {token}, which this model leaves out when it counts positions: "
                "its results would not be the model's. Leave padding away; prompts need none."
            )
    return [int(token) for token in prompt]


def check_unicode(text: str, name: str) -> None:
    """Raises RequestError: `text` cannot be encoded, so neither tokenised nor hashed."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The {name} is no Unicode text: character {error.start} is half of a surrogate pair."
        ) from error


def check_params(params: SamplingParams, tokenizer, vocab_size: int) -> None:
    """Raise RequestError if sampling parameters ask for what this model cannot do."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, not {type(params).__name__}.")
    if params.stop and tokenizer is None:
        raise RequestError("Stop strings need a tokenizer, and the model has none: use stop_token_ids.")
    bad = [t for t in params.stop_token_ids if t >= vocab_size]
    if bad:
        raise RequestError(f"stop_token_ids {bad} are outside the vocabulary of {vocab_size}.")


def whole_priority(priority) -> int:
    """A request's priority; of numpy, too. Raises RequestError."""
    if not isinstance(priority, Integral) or isinstance(priority, bool):
        raise RequestError(f"priority={priority!r}: use a whole number, smaller is served first.")
    return int(priority)


def check_beams(beam_width: int, max_tokens: int, length_penalty: float) -> None:
    """Raise RequestError for options that beam search cannot use."""
    for name, value in (("beam_width", beam_width), ("max_tokens", max_tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(f"{name}={value!r}: use a whole number, at least 1.")
    if not isinstance(length_penalty, (int, float)) or not math.isfinite(length_penalty):
        raise RequestError(f"length_penalty={length_penalty!r}: use a number, 0.0 for none.")
