"""How a model numbers the positions of a sequence when it is given none.

Most count from 0. Families that come from fairseq (RoBERTa, CamemBERT, XLM-R, ...) count from padding_idx + 1 and
leave padding out: what the graph gets as position p must reach them as p + padding_idx + 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

NUMBERING_FROM_IDS = "create_position_ids_from_input_ids"


@dataclass(frozen=True)
class Numbering:
    """The source's position of a sequence's first token, and the id that it does not count (None: counts all)."""

    offset: int = 0
    uncounted_id: int | None = None


def numbering(module: torch.nn.Module) -> Numbering:
    """How the model numbers positions when it is given none."""
    for part in module.modules():
        padding = getattr(part, "padding_idx", None)
        if type(part).__name__.endswith("Embeddings") and padding is not None and _counts_ids(part):
            return Numbering(padding + 1, padding)
    return Numbering()


def _counts_ids(part: torch.nn.Module) -> bool:
    return hasattr(part, NUMBERING_FROM_IDS) or hasattr(
        sys.modules[type(part).__module__], NUMBERING_FROM_IDS
    )
