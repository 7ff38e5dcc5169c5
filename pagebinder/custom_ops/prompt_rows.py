"""How a prompt's embeddings are told from tokens, in graphs (`frontend/prompt_rows.py`) and requests
(`runtime/prompt_rows.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from pagebinder.custom_ops.library import NAMESPACE, library

# Row r of the tables is token id FIRST_ROW_ID + r: beyond every vocabulary.
FIRST_ROW_ID = 1 << 30
MOST_POSITION = 1 << 24  # RoPE turns by positions in float32, which holds whole numbers up to here
# Names of the tables in graphs.
ROWS, POSITIONS, LOOKAHEAD, IDS = "prompt_rows", "prompt_positions", "prompt_lookahead", "prompt_ids"
FEATURES = "prompt_features_{}"


@dataclass(frozen=True, eq=False)
class Embeds:
    """Embeddings in the place of tokens of a prompt, with what some models take beside them.

    Args:
        values: [n, C], floating.
        positions: [n, A] int64, from the prompt's beginning. None: as those of tokens.
        next_position: of the token behind them, along each axis. None: the largest of them and one.
        features: [n, C] each, what is added behind the first layers; (): nothing.
        lookahead: [n] int64, how many of the embeddings behind it each one sees beside those before it. None: none.
        token_ids: [n] int64, what stood in their place, for models that read it besides (Gemma 3n).
    """

    values: torch.Tensor
    positions: torch.Tensor | None = None
    features: tuple[torch.Tensor, ...] = ()
    next_position: int | None = None
    lookahead: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class PromptTables:
    """What graphs read in the place of tokens: rows [S, C] of embeddings; where positions have axes (time, height and
    width) those of each row [S, A] int64; what is added to rows behind the first layers, [S, C] for each; where
    layers let rows see those behind them, how many [S] int32; where token ids are read besides, those [S] int64."""

    rows: torch.Tensor
    positions: torch.Tensor | None = None
    features: tuple[torch.Tensor, ...] = ()
    lookahead: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        optional = {POSITIONS: self.positions, LOOKAHEAD: self.lookahead, IDS: self.token_ids}
        return {
            ROWS: self.rows,
            **{name: table for name, table in optional.items() if table is not None},
            **{FEATURES.format(i): table for i, table in enumerate(self.features)},
        }

    @classmethod
    def found_in(cls, attributes: Mapping[str, torch.Tensor]) -> PromptTables | None:
        """Empty ones of the sizes that a graph's attributes have; None: it has none."""
        if ROWS not in attributes:
            return None
        names = itertools.takewhile(attributes.__contains__, map(FEATURES.format, itertools.count()))
        found = {name: _empty(attributes[name]) for name in (POSITIONS, LOOKAHEAD, IDS) if name in attributes}
        return cls(
            _empty(attributes[ROWS]),
            found.get(POSITIONS),
            tuple(_empty(attributes[name]) for name in names),
            found.get(LOOKAHEAD),
            found.get(IDS),
        )


def seen_ranges(lookahead: torch.Tensor) -> Iterator[tuple[int, int]]:
    """[start, end) of rows that see each other, as one step has to compute them: of lookahead [n]."""
    start = end = 0
    for row, ahead in enumerate(lookahead.tolist()):
        if row >= end:
            if end - start > 1:
                yield start, end
            start = end = row
        end = max(end, row + ahead + 1)
    if end - start > 1:
        yield start, end


def empty_table(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that are written later, whatever mode they are made in."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def _empty(like: torch.Tensor) -> torch.Tensor:
    return empty_table(*like.shape, dtype=like.dtype, device=like.device)


def _position_axes(positions: torch.Tensor, axes: int) -> torch.Tensor:
    return positions.expand(axes, -1).clone()


def _position_axes_fake(positions: torch.Tensor, axes: int) -> torch.Tensor:
    return positions.new_empty((axes, positions.shape[0]))


def _row_features(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


# Positions [T] along each axis [A, T], as tokens have them: stands in a graph while it is captured, where rows will
# have their own.
library(NAMESPACE).define("position_axes(Tensor positions, int axes) -> Tensor")
library(NAMESPACE).impl("position_axes", _position_axes, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::position_axes", _position_axes_fake, lib=library(NAMESPACE))
# What is added to the states x [1, T, C] of rows behind a layer, nothing for tokens: stands in a graph likewise.
library(NAMESPACE).define("row_features(Tensor x, int number) -> Tensor")
library(NAMESPACE).impl("row_features", _row_features, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::row_features", _row_features, lib=library(NAMESPACE))
# What a multimodal model gives its language model, x [1, T, C]: stands in a graph where rows will come in.
library(NAMESPACE).define("language_model_entry(Tensor x) -> Tensor")
library(NAMESPACE).impl("language_model_entry", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::language_model_entry", torch.clone, lib=library(NAMESPACE))
ENTRY = torch.ops.pagebinder.language_model_entry.default
ROW_FEATURES = torch.ops.pagebinder.row_features.default
POSITION_AXES = torch.ops.pagebinder.position_axes.default
