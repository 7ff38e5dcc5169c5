"""A prompt of several parts: token ids, text, and embeddings in their place.

    [1, 733, "Describe this: ", embeds [576, C], 733]    ->    token ids, media ranges, rows that are held

    positions along axes     0 1 2 | 3..3, 3..26, 3..26 | 27 28 ...      an image has more tokens than positions
    tokens                   0 1 2 | 3 ...........  578 | 579 580 ...
    shifts                              (579, -552)                      from token 579 on, 552 less

What is behind an image is told from its place by its shift alone, which follows from the images before it: so the
digests of these tell prefixes apart.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from pagebinder.errors import RequestError
from pagebinder.runtime.engine_setup import EngineModel
from pagebinder.runtime.prompt_rows import Embeds, HeldRows
from pagebinder.runtime.request_checks import is_embeds, prompt_token_ids


def has_embeds(prompt: Any) -> bool:
    return is_embeds(prompt) or (isinstance(prompt, (list, tuple)) and any(map(is_embeds, prompt)))


def parts_as_tokens(prompt: Any, model: EngineModel) -> tuple[list[int], dict[str, Any]]:
    """Token ids of a prompt with embeddings, and the fields of its `Request` beside them.

    Text has the tokenizer's special tokens only where the prompt begins with it.

    Raises:
        RequestError: the model was not compiled for embeddings; a part is none, or is wrong.
        CacheCapacityError: there is no room for the embeddings at present.
    """
    if model.prompt_rows is None:
        raise RequestError(
            "The prompt holds embeddings, which the model was not compiled for: use CompileConfig(prompt_embeds=N), "
            "N of them at a time."
        )
    rows = model.prompt_rows
    tokens: list[int] = []
    media: list[tuple[str, int, int]] = []
    held: list[HeldRows] = []
    shifts: list[tuple[int, int]] = []
    for part in _parts(prompt):
        start, shift = len(tokens), shifts[-1][1] if shifts else 0
        if is_embeds(part):
            embeds = part if isinstance(part, Embeds) else Embeds(torch.as_tensor(part))
            positions = embeds.positions
            if positions is None and rows.axes:
                first = start + shift
                positions = torch.arange(first, first + len(embeds.values))[:, None].expand(-1, rows.axes)
            held.append(rows.hold(embeds.values, positions, embeds.features))
            tokens += held[-1].token_ids
            media.append((held[-1].digest, start, len(tokens)))
            if positions is not None and (behind := int(positions.max()) + 1 - len(tokens)) != shift:
                shifts.append((len(tokens), behind))
        elif not isinstance(part, str) or part:  # text may be empty
            tokens += prompt_token_ids(
                part,
                model.tokenizer,
                model.vocab_size,
                special_tokens=not tokens,
                uncounted_id=model.uncounted_id,
            )
    return tokens, {"media": tuple(media), "held": tuple(held), "position_shifts": tuple(shifts)}


class _Tokens(list):
    """Token ids that follow one another."""


def _parts(prompt: Any) -> list:
    """Embeddings, texts and runs of token ids, in their order."""
    if is_embeds(prompt):
        return [prompt]
    parts: list[Any] = []
    for item in prompt:
        if not isinstance(item, Integral):
            parts.append(item)
        elif parts and type(parts[-1]) is _Tokens:
            parts[-1].append(item)
        else:
            parts.append(_Tokens([item]))
    return parts
