"""How a prompt's embeddings are told from tokens, in graphs (`frontend/prompt_rows.py`) and requests
(`runtime/prompt_rows.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagebinder.custom_ops.library import NAMESPACE, library

# Row r of the tables is token id FIRST_ROW_ID + r: beyond every vocabulary.
FIRST_ROW_ID = 1 << 30
ROWS, POSITIONS = "prompt_rows", "prompt_positions"  # names of the tables in graphs


@dataclass(frozen=True, eq=False)
class PromptTables:
    """What graphs read in the place of tokens: rows [S, C] of embeddings, and where positions have axes (time, height
    and width) those of each row [S, A] int64."""

    rows: torch.Tensor
    positions: torch.Tensor | None = None

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        tables = {ROWS: self.rows, POSITIONS: self.positions}
        return {name: table for name, table in tables.items() if table is not None}

    @classmethod
    def found_in(cls, attributes: Mapping[str, torch.Tensor]) -> PromptTables | None:
        """Empty ones of the sizes that a graph's attributes have; None: it has none."""
        if ROWS not in attributes:
            return None
        found = (attributes.get(name) for name in (ROWS, POSITIONS))
        return cls(
            *(None if t is None else torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in found)
        )


def _position_axes(positions: torch.Tensor, axes: int) -> torch.Tensor:
    return positions.expand(axes, -1).clone()


def _position_axes_fake(positions: torch.Tensor, axes: int) -> torch.Tensor:
    return positions.new_empty((axes, positions.shape[0]))


# Positions [T] along each axis [A, T], as tokens have them: stands in a graph while it is captured, where rows will
# have their own.
library(NAMESPACE).define("position_axes(Tensor positions, int axes) -> Tensor")
library(NAMESPACE).impl("position_axes", _position_axes, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::position_axes", _position_axes_fake, lib=library(NAMESPACE))
POSITION_AXES = torch.ops.pagebinder.position_axes.default
