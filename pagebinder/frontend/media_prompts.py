"""Prompts with images, sound or video, of models that make embeddings of them: the model's own code makes the prompt.

    processor(...) -> input_ids, pixel_values, ...
        |  the source model, up to the call of its language model
        v
    language_model(inputs_embeds=[1, T, C], position_ids=..., attention_mask=..., ...)
        |  where a row is not what the token's own would be, it is an embedding of the prompt
        v
    [1, 733, embeds [576, C], 733, 5]              embeds with positions, where these have several axes

Nothing is known here of any family. That embeddings are all that the language model is told of an image is proven
for each prompt: it is called again for the same tokens without media, and what else it is given must be the same.
Positions of its own, features that layers add, and how many of the embeddings behind it it sees (`lookahead.py`) may
come with an embedding. Where anything else differs, the prompt is refused with the name of it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from typing import Any

import torch

from pagebinder.custom_ops.prompt_rows import Embeds, PromptTables, seen_ranges
from pagebinder.errors import RequestError
from pagebinder.frontend.language_model import EMBEDS, MASK, given_to, language_model
from pagebinder.frontend.lookahead import Layers, lookahead_of
from pagebinder.frontend.python_state import evaluation_mode
from pagebinder.frontend.row_features import ADDED, ADDED_TO

# What a processor gives of the text, and what tells a language model how to answer rather than what it reads.
TEXT_INPUTS = ("input_ids", "attention_mask")
POSITIONS = "position_ids"
_ASKING = threading.Lock()  # hooks of one call would end another's
REMEDY = {
    "position_ids": "its positions are not counted token by token, as for text",
    "attention_mask": "its tokens do not attend as text does, each to those before it",
}


def media_prompt(
    model: torch.nn.Module, inputs: Mapping[str, Any], tables: PromptTables | None, layers: Layers
) -> list:
    """A prompt of token ids and embeddings (tensors [n, C], or `Embeds` with what they have beside them), in the
    order of the tokens.

    Args:
        model: the source model, transformers' class for all kinds of inputs, with weights.
        inputs: what its processor made of one prompt: input_ids [1, T], and tensors for the media.
        tables: what the compiled model takes beside embeddings; None: nothing. layers: what its attention can do for
            them, see `layers_of`.
    Raises:
        RequestError: no such model or inputs; the language model is told more of the media than embeddings.
    """
    ids, text, media = _split(model, inputs)
    inner = _language_model(model)
    tables = tables or PromptTables(torch.empty(0))
    axes = 0 if tables.positions is None else tables.positions.shape[1]
    num_features = len(tables.features)
    with _ASKING, torch.no_grad(), evaluation_mode(model):
        plain, told = given_to(inner, model, text), given_to(inner, model, text | media)
    name = type(model).__name__
    for argument in sorted(plain.keys() | told.keys()):
        understood = argument == EMBEDS or (axes and argument == POSITIONS)
        understood = understood or (num_features and argument in (ADDED_TO, ADDED))
        understood = understood or (layers and argument == MASK)
        if not understood and not _same(plain.get(argument), told.get(argument)):
            why = REMEDY.get(argument, "it is more than embeddings in the place of tokens")
            why = "it computes the media itself" if argument in media else why
            raise RequestError(
                f"{name} tells its language model more of this prompt than embeddings: {argument} is not what it is "
                f"for text ({why}). Prompts like it are not served."
            )
    embeds, own = told[EMBEDS], plain[EMBEDS]
    if embeds.shape != own.shape or embeds.dim() != 3 or embeds.shape[:2] != ids.shape:
        raise RequestError(
            f"{name} makes {tuple(embeds.shape)} embeddings of {tuple(ids.shape)} tokens: a row for each is wanted."
        )
    is_row = (embeds[0] != own[0]).any(-1)
    lookahead = lookahead_of(told.get(MASK), layers, ids.shape[1], name)
    for start, end in seen_ranges(lookahead):
        is_row[start:end] = True  # what sees others is known by all of them, as an image is by its parts
    is_embedding = is_row.tolist()
    positions = _positions(told.get(POSITIONS), axes, ids.shape[1], name) if axes else None
    if positions is not None:
        _check_text_positions(positions, is_embedding, name)
    features = _features(told, embeds[0], is_embedding, num_features, name)
    return _parts(
        ids[0], embeds[0], is_embedding, positions, features, lookahead, tables.token_ids is not None
    )


def _split(model: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, dict, dict]:
    """The token ids, the inputs of the text, and those of the media."""
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("input_ids"), torch.Tensor):
        raise RequestError(
            'Give what the model\'s processor returns with return_tensors="pt": a mapping with input_ids [1, T].'
        )
    ids = inputs["input_ids"]
    if ids.dim() != 2 or len(ids) != 1 or ids.dtype != torch.int64 or not ids.numel():
        raise RequestError(
            f"input_ids must be int64 [1, T], of one prompt; they are {ids.dtype} {tuple(ids.shape)}."
        )
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        raise RequestError("attention_mask hides tokens: make the inputs without padding.")
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.is_meta:
        raise RequestError(f"{type(model).__name__} has no weights to compute embeddings with.")
    if getattr(getattr(model, "config", None), "has_lora_adapter", False):
        raise RequestError(
            f"{type(model).__name__} puts on an adapter where there are media: prompts with them are not served."
        )
    takes = inspect.signature(model.forward).parameters
    given = {
        key: value.to(parameter.device) if isinstance(value, torch.Tensor) else value
        for key, value in inputs.items()
        if isinstance(value, torch.Tensor) or key in takes  # else it tells `generate` how to answer
    }
    text = {key: given[key] for key in TEXT_INPUTS if key in given}
    media = {key: value for key, value in given.items() if key not in text}
    return given["input_ids"], text, media


def _language_model(model: torch.nn.Module) -> torch.nn.Module:
    """Raises RequestError where there is none."""
    found = language_model(model)
    if found is None:
        raise RequestError(f"{type(model).__name__} has no language model of its own that takes {EMBEDS}.")
    return found


def _same(a: Any, b: Any) -> bool:
    """Are two arguments the same, as far as they are tensors, numbers, and collections of such?"""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    return a is b or (type(a) is type(b) and a == b)


def _positions(given: Any, axes: int, num_tokens: int, name: str) -> torch.Tensor:
    """[T, A] of what the language model is called with: [A, 1, T], [1 + A, 1, T] with places in front, or nothing."""
    places = torch.arange(num_tokens)
    if given is None:
        return places[:, None].expand(-1, axes)
    if isinstance(given, torch.Tensor) and given.dim() == 3 and given.shape[1:] == (1, num_tokens):
        rows = given[:, 0].cpu().to(torch.int64)
        if len(rows) == axes + 1 and torch.equal(rows[0], places):
            rows = rows[1:]
        if len(rows) == axes:
            return rows.T
    raise RequestError(f"{name} gives its language model positions that are not [{axes}, 1, {num_tokens}].")


def _check_text_positions(positions: torch.Tensor, is_embedding: list[bool], name: str) -> None:
    """Tokens that follow one another are counted one by one, the same along all axes; those in front from 0 on."""
    following = 0
    for row, of_media in zip(positions.tolist(), is_embedding):
        if of_media:
            following = None
            continue
        if row != [row[0] if following is None else following] * len(row):
            raise RequestError(
                f"{name} gives tokens the positions {row}: prompts whose text is not counted one by one are not "
                "served."
            )
        following = row[0] + 1


def _features(
    told: dict[str, Any], embeds: torch.Tensor, is_embedding: list[bool], count: int, name: str
) -> list[torch.Tensor]:
    """What is added to each token's states behind the first layers, [T, C] each; zeros where nothing is."""
    mask, added = told.get(ADDED_TO), told.get(ADDED)
    if not count or added is None or mask is None:
        return []
    places = mask.reshape(-1)
    fits = len(added) == count and mask.shape == (1, len(embeds)) and places.dtype == torch.bool
    wanted = (int(places.sum()), embeds.shape[1])
    fits = fits and all(isinstance(one, torch.Tensor) and one.shape == wanted for one in added)
    if not fits or any(there and not here for there, here in zip(places.tolist(), is_embedding)):
        raise RequestError(
            f"{name} adds something behind layers to other tokens than those that its media are."
        )
    features = []
    for one in added:
        features.append(torch.zeros_like(embeds))
        features[-1][places] = one.to(embeds)
    return features


def _parts(
    ids: torch.Tensor,
    embeds: torch.Tensor,
    is_embedding: list[bool],
    positions: torch.Tensor | None,
    features: list[torch.Tensor],
    lookahead: torch.Tensor,
    reads_ids: bool,
) -> list:
    parts: list[int | torch.Tensor | Embeds] = []
    start = 0
    for end in range(1, len(is_embedding) + 1):
        if end < len(is_embedding) and is_embedding[end] == is_embedding[start]:
            continue
        if not is_embedding[start]:
            parts += ids[start:end].tolist()
        elif positions is None and not features and not lookahead[start:end].any() and not reads_ids:
            parts.append(embeds[start:end].clone())
        else:
            along = None if positions is None else positions[start:end].clone()
            beside = tuple(one[start:end].clone() for one in features)
            behind = int(positions[end, 0]) if positions is not None and end < len(positions) else None
            ahead = lookahead[start:end].clone() if lookahead[start:end].any() else None
            stood = ids[start:end].clone() if reads_ids else None
            parts.append(Embeds(embeds[start:end].clone(), along, beside, behind, ahead, stood))
        start = end
    return parts
