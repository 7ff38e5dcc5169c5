"""What an encoder-decoder's request brings besides its decoder's prompt, checked before anything changes.

    encoder prompt   | e0 e1 ... e40 |          required; the encoder runs once over all of it
    decoder prompt   | start |                  by default the start token alone; what is given is used as is

A checkpoint's forced_bos_token_id and forced_eos_token_id are not applied. Where a model needs the former (mBART's
target language), put it into the decoder's prompt: [decoder start, language].
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from pagebinder.errors import RequestError
from pagebinder.runtime.engine_setup import ENCODER_LIMIT, EngineModel
from pagebinder.runtime.kv.hashing import encode_key
from pagebinder.runtime.prompt_parts import parts_as_tokens
from pagebinder.runtime.request_checks import Prompt, has_embeds, prompt_list, prompt_token_ids


def encoder_fields(
    prompt: Prompt | None, model: EngineModel, max_tokens: int, cache_salt: str | None = None
) -> dict[str, Any]:
    """The fields of a `Request` that an encoder prompt (text or token ids) of at most `max_tokens` fills.

    Raises:
        RequestError: a prompt is missing, or given to a model without an encoder; bad or too many token ids.
    """
    if model.encoder is None:
        if prompt is None:
            return {}
        raise RequestError("The model has no encoder: leave encoder_prompt away.")
    if prompt is None:
        raise RequestError("The model is an encoder-decoder: give encoder_prompt, what its encoder reads.")
    tokens = prompt_token_ids(
        prompt,
        model.tokenizer,
        model.encoder.vocab_size,
        name="encoder prompt",
        uncounted_id=model.uncounted_id,
    )
    if len(tokens) > max_tokens:
        limit = model.encoder.max_len
        remedy = f", or raise EngineConfig.max_encoder_tokens (the model's limit is {limit})."
        raise RequestError(
            f"The encoder prompt has {len(tokens)} tokens, but at most {max_tokens} are allowed; shorten it"
            + (remedy if max_tokens < limit else f". {ENCODER_LIMIT}")
        )
    return {
        "encoder_token_ids": tuple(tokens),
        "encoder_hash": encoder_hash(tokens, cache_salt),
        "num_encoder_tokens": len(tokens),
    }


def decoder_prompt(prompt: Prompt | None, model: EngineModel) -> tuple[list[int], dict[str, Any]]:
    """The decoder's prompt as token ids, and what its `Request` has beside them where it holds embeddings.

    Raises RequestError, CacheCapacityError as `decoder_prompt_ids` and `parts_as_tokens`.
    """
    if has_embeds(prompt):
        return parts_as_tokens(prompt, model)
    return decoder_prompt_ids(prompt, model), {}


def decoder_prompt_ids(prompt: Prompt | None, model: EngineModel) -> list[int]:
    """The decoder's prompt as token ids; of an encoder-decoder it may be left away.

    Text after the decoder's start token is tokenised without special tokens; token ids are used as they are.
    Raises RequestError as `prompt_token_ids`, and if a model has no start token and no prompt is given.
    """
    if model.encoder is None:
        return prompt_token_ids(
            prompt, model.tokenizer, model.vocab_size, uncounted_id=model.uncounted_id,
            num_rows=model.num_prompt_rows,
        )  # fmt: skip
    start = model.encoder.decoder_start_token_id
    if prompt is not None and not isinstance(prompt, str):
        return prompt_token_ids(prompt, model.tokenizer, model.vocab_size, uncounted_id=model.uncounted_id)
    if start is None:
        raise RequestError(
            "The model's config has no decoder_start_token_id: give the decoder's prompt as token ids, beginning "
            "with the token that it starts from."
        )
    if not 0 <= start < model.vocab_size:
        raise RequestError(
            f"decoder_start_token_id={start} of the config is no token: the decoder has {model.vocab_size:,} tokens; "
            "give the decoder's prompt as token ids, beginning with the token that it starts from."
        )
    if not prompt:
        return [start]
    ids = prompt_token_ids(
        prompt, model.tokenizer, model.vocab_size, special_tokens=False, uncounted_id=model.uncounted_id
    )
    return [start, *ids]


def pair_prompts(prompts, encoder_prompts) -> list[tuple[Prompt | None, Prompt | None]]:
    """(decoder prompt, encoder prompt) of every request of a call; either may be one prompt, or None for all.

    Raises RequestError if the numbers differ, or neither is given.
    """
    if encoder_prompts is None:
        return [(prompt, None) for prompt in prompt_list(prompts)]
    encoder_list = prompt_list(encoder_prompts)
    if prompts is None:
        return [(None, encoder_prompt) for encoder_prompt in encoder_list]
    decoder_list = prompt_list(prompts)
    if len(decoder_list) != len(encoder_list):
        raise RequestError(
            f"{len(encoder_list)} encoder prompts but {len(decoder_list)} decoder prompts; give one each, or no "
            "decoder prompts at all."
        )
    return list(zip(decoder_list, encoder_list))


def encoder_hash(tokens: Sequence[int], cache_salt: str | None) -> bytes:
    """SHA-256 of encoder tokens and salt: requests with equal ones share the encoder's blocks."""
    salt = () if cache_salt is None else (("cache_salt", cache_salt),)
    ids = struct.pack(f"<{len(tokens)}q", *tokens)
    return hashlib.sha256(encode_key(("encoder prompt", ids, *salt))).digest()
