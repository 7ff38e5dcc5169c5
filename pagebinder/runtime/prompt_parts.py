"""A prompt of several parts: token ids, text, and embeddings in their place.

    [1, 733, "Describe this: ", embeds [576, C], 733]    ->    token ids, media ranges, rows that are held

    positions along axes     0 1 2 | 3..3, 3..26, 3..26 | 27 28 ...      an image has more tokens than positions
    tokens                   0 1 2 | 3 ...........  578 | 579 580 ...
    shifts                              (579, -552)                      from token 579 on, 552 less

What is behind an image is told from its place by its shift alone, which follows from the images before it: so the
digests of these tell prefixes apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np
import torch

from pagebinder.config_checks import is_int, short_repr
from pagebinder.custom_ops.prompt_rows import MOST_POSITION, Embeds, seen_ranges
from pagebinder.errors import CacheCapacityError, RequestError
from pagebinder.runtime.engine_setup import EngineModel
from pagebinder.runtime.prompt_rows import HeldRows
from pagebinder.runtime.request_checks import is_embeds, prompt_token_ids


def parts_as_tokens(prompt: Any, model: EngineModel) -> tuple[list[int], dict[str, Any]]:
    """Token ids of a prompt with embeddings, and the fields of its `Request` beside them.

    Text has the tokenizer's special tokens only where the prompt begins with it.

    Raises:
        RequestError: the model was not compiled for embeddings; a part is none, or is wrong.
        CacheCapacityError: there is no room for the embeddings at present.
    """
    if model.encoder is not None:
        raise RequestError("The prompt holds embeddings, and an encoder-decoder takes token ids alone.")
    if model.prompt_rows is None:
        raise RequestError(
            "The prompt holds embeddings, which the model was not compiled for: use CompileConfig(prompt_embeds=N), "
            "N of them at a time."
        )
    held: list[HeldRows] = []
    try:
        return _as_tokens(_parts(prompt), model, held)
    except CacheCapacityError as error:
        release(held)
        num_rows = sum(len(part.values) for part in map(_as_embeds, filter(is_embeds, _parts(prompt))))
        if num_rows > len(model.prompt_rows.table):
            raise RequestError(
                f"The prompt's {num_rows} embeddings are more than the {len(model.prompt_rows.table)} that the model "
                f"was compiled for; compile it with CompileConfig(prompt_embeds={num_rows}) or more."
            ) from error
        raise
    except BaseException:
        release(held)
        raise


def release(held: Iterable[HeldRows]) -> None:
    """Of a request that is none: whoever keeps the exception keeps what the call held."""
    for rows in held:
        rows.release()


def _as_tokens(parts: list, model: EngineModel, held: list[HeldRows]) -> tuple[list[int], dict[str, Any]]:
    rows = model.prompt_rows
    tokens: list[int] = []
    media: list[tuple[str, int, int]] = []
    shifts: list[tuple[int, int]] = []
    whole: list[tuple[int, int]] = []
    for part in parts:
        start, shift = len(tokens), shifts[-1][1] if shifts else 0
        if is_embeds(part):
            embeds = _as_embeds(part)
            positions = embeds.positions
            if positions is None and rows.axes:
                places = range(start + shift, start + shift + len(embeds.values))
                positions = torch.tensor(places, device="cpu")[:, None].expand(-1, rows.axes)
            ids = embeds.token_ids
            if isinstance(ids, torch.Tensor) and bool(((ids < 0) | (ids >= model.vocab_size)).any()):
                raise RequestError(f"token_ids of embeddings: the model has {model.vocab_size} from 0 on.")
            behind = _position_behind(embeds.next_position, positions)
            held.append(rows.hold(dataclasses.replace(embeds, positions=positions, next_position=behind)))
            tokens += held[-1].token_ids
            if embeds.lookahead is not None:
                whole += [(start + first, start + end) for first, end in seen_ranges(embeds.lookahead)]
            media.append((held[-1].digest, start, len(tokens)))
            if behind is not None and behind - len(tokens) != shift:
                shifts.append((len(tokens), behind - len(tokens)))
        elif len(part):  # text and lists may be empty beside embeddings
            tokens += prompt_token_ids(
                part,
                model.tokenizer,
                model.vocab_size,
                special_tokens=not tokens,
                uncounted_id=model.uncounted_id,
                num_rows=model.num_prompt_rows,
            )
    return tokens, {
        "media": tuple(media),
        "held": tuple(held),
        "position_shifts": tuple(shifts),
        "whole_ranges": tuple(whole),
    }


def _position_behind(said: int | None, positions: torch.Tensor | None) -> int | None:
    """Of the token behind embeddings; None: it is its place. Raises RequestError."""
    if said is not None and (not is_int(said) or not 0 <= said <= MOST_POSITION or positions is None):
        raise RequestError(
            f"next_position={said!r}: use a whole number from 0 to {MOST_POSITION:,}, with positions along axes."
        )
    usable = isinstance(positions, torch.Tensor) and positions.numel() > 0
    return int(positions.max()) + 1 if said is None and usable else said


def _as_embeds(part: Any) -> Embeds:
    """Raises RequestError for what is no tensor."""
    if isinstance(part, np.ndarray):
        part = torch.from_numpy(np.array(part, np.float64 if part.dtype.itemsize > 4 else np.float32))
    embeds = part if isinstance(part, Embeds) else Embeds(part)
    if not isinstance(embeds.values, torch.Tensor) or embeds.values.dim() != 2:
        raise RequestError("Embeds holds a floating tensor [tokens, width].")
    return embeds


class _Tokens(list):
    """Token ids that follow one another."""


def _parts(prompt: Any) -> list:
    """Embeddings, texts and runs of token ids, in their order."""
    if is_embeds(prompt):
        return [prompt]
    parts: list[Any] = []
    for item in prompt:
        if isinstance(item, torch.Tensor) and item.dim() == 0 and not item.is_floating_point():
            item = item.item()
        if not isinstance(item, Integral):
            if not hasattr(item, "__len__") and not is_embeds(item):
                raise RequestError(
                    f"A prompt's parts are token ids, texts and embeddings [tokens, width], not {short_repr(item)}."
                )
            parts.append(item)
        elif parts and type(parts[-1]) is _Tokens:
            parts[-1].append(item)
        else:
            parts.append(_Tokens([item]))
    return parts
