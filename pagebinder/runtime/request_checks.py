"""What a request must be before anything changes for it: a prompt of valid tokens, parameters that fit the model."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np
import torch

from pagebinder.config import SamplingParams
from pagebinder.config_checks import check_unicode, is_number, plain_number, short_repr
from pagebinder.custom_ops.prompt_rows import FIRST_ROW_ID, Embeds
from pagebinder.errors import RequestError

Prompt = str | Sequence[int]  # or a list of token ids, texts and embeddings (`prompt_parts.py`)
MOST_BEAMS = 1024  # all are forked in one piece
MOST_LENGTH_PENALTY = 16.0  # no number of tokens to this power is too large for a float


def is_embeds(value) -> bool:
    """Is it a tensor (or array) of embeddings, [tokens, width]?"""
    if isinstance(value, Embeds):
        return True
    return (isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 2) or (
        isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.ndim == 2
    )


def has_embeds(prompt) -> bool:
    """Is it one prompt that is embeddings, or a list that holds some?"""
    return is_embeds(prompt) or (isinstance(prompt, (list, tuple)) and any(map(is_embeds, prompt)))


def prompt_list(prompts) -> list:
    """One prompt or several (a list, or a tensor of token ids) as a list of prompts. A list that holds embeddings is
    one prompt. Raises RequestError."""
    if has_embeds(prompts):
        return [prompts]
    prompts = _listed(prompts, "prompt")
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
    num_rows: int = 0,
) -> list[int]:
    """A prompt (text, token ids, or a 1-D tensor of them) as a list of token ids.

    `name`: what messages call it. `special_tokens`: whether text gets those that the tokenizer adds. `num_rows`: of
    embeddings, which have ids of their own that no prompt may hold.

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
    prompt = _listed(prompt, name)
    if not isinstance(prompt, Sequence):
        raise RequestError(f"A prompt is text or a list of token ids, not {type(prompt).__name__}.")
    if len(prompt) == 0:
        raise RequestError(f"The {name} is empty: give at least one token.")
    for token in prompt:
        if not isinstance(token, Integral) or isinstance(token, bool):
            _refuse_floats(token, name)
            raise RequestError(f"Token ids are whole numbers; the {name} holds {short_repr(token)}.")
        if not 0 <= token < vocab_size:
            is_row = FIRST_ROW_ID <= token < FIRST_ROW_ID + num_rows
            why = " (it stands for an embedding of another prompt)" if is_row else ""
            raise RequestError(
                f"Token id {short_repr(token)} is out of range: the vocabulary has ids 0 to {vocab_size - 1}{why}."
            )
        if token == uncounted_id:
            raise RequestError(
                f"The {name} holds the padding token {token}, which this model leaves out of its positions or "
                "masks: its results would not be the model's. Leave padding away; prompts need none."
            )
    return [int(token) for token in prompt]


def _listed(prompt, name: str):
    """A tensor or an array as a list, other things as they are. Raises RequestError for bytes, whose numbers are no
    token ids."""
    if hasattr(prompt, "tolist") and not isinstance(prompt, memoryview):
        _refuse_floats(prompt, name)
        prompt = prompt.tolist()
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise RequestError(
            f"The {name} is {type(prompt).__name__}: give text (bytes.decode), or a list of token ids."
        )
    return prompt


def _refuse_floats(value, name: str) -> None:
    """Raise RequestError for a tensor or an array of floating numbers."""
    if str(getattr(value, "dtype", "")).startswith(("torch.float", "torch.bfloat", "float")):
        raise RequestError(
            f"The {name} holds floating numbers of the shape {tuple(value.shape)}: token ids are whole numbers, and "
            "embeddings are [tokens, width]."
        )


def check_params(params: SamplingParams, tokenizer, vocab_size: int) -> None:
    """Raise RequestError if sampling parameters ask for what this model cannot do."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, not {type(params).__name__}.")
    if params.stop and tokenizer is None:
        raise RequestError("Stop strings need a tokenizer, and the model has none: use stop_token_ids.")
    if len(set(params.suppress_tokens)) >= vocab_size:
        raise RequestError("suppress_tokens names all tokens: none would be left.")
    for name in ("stop_token_ids", "suppress_tokens", "logit_bias"):
        bad = [t for t in getattr(params, name) if t >= vocab_size]
        if bad:
            raise RequestError(f"{name} {short_repr(bad)} are outside the vocabulary of {vocab_size}.")


def whole_priority(priority) -> int:
    """A request's priority; of numpy, too. Raises RequestError."""
    if not isinstance(priority, Integral) or isinstance(priority, bool):
        raise RequestError(f"priority={priority!r}: use a whole number, smaller is served first.")
    return int(priority)


def beam_options(beam_width: int, max_tokens: int, length_penalty: float) -> tuple[int, int, float]:
    """Options of beam search, those of numpy as Python's numbers. Raises RequestError for what it cannot use."""
    width, most, penalty = map(plain_number, (beam_width, max_tokens, length_penalty))
    for name, value in (("beam_width", width), ("max_tokens", most)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(f"{name}={value!r}: use a whole number, at least 1.")
    if width > MOST_BEAMS:
        raise RequestError(f"beam_width={width}: use {MOST_BEAMS} at most.")
    if not is_number(penalty) or abs(penalty) > MOST_LENGTH_PENALTY:
        raise RequestError(
            f"length_penalty={penalty!r}: use {-MOST_LENGTH_PENALTY} to {MOST_LENGTH_PENALTY}, 0.0 for none."
        )
    return width, most, float(penalty)


def check_id(request_id: str) -> None:
    """Raise RequestError: no string can be this request id."""
    if not isinstance(request_id, str):
        raise RequestError(f"request_id={request_id!r}: use the string that the request was added with.")
