"""How a model numbers the positions of a sequence when it is given none.

Most count from 0. Families that come from fairseq (RoBERTa, CamemBERT, XLM-R, ...) count from padding_idx + 1 and
leave padding out: what the graph gets as position p must reach them as p + padding_idx + 1. T5Gemma masks the padding
of a prompt that comes without a mask.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass

import torch

NUMBERING_FROM_IDS = "create_position_ids_from_input_ids"
GROWING_TABLE = "SinusoidalPositionalEmbedding"
MASKS_FROM_LENGTHS = "get_masks"
MASK_FROM_IDS = "make_default_2d_attention_mask"


@dataclass(frozen=True)
class Numbering:
    """The source's position of a sequence's first token, and the id that it does not count, or masks (None: there is
    none)."""

    offset: int = 0
    uncounted_id: int | None = None

    def counted(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of the same shape that prompts may hold: another one in the place of what is not counted."""
        if self.uncounted_id is None:
            return ids
        return ids.masked_fill(ids == self.uncounted_id, 0 if self.uncounted_id else 1)


def numbering(module: torch.nn.Module) -> Numbering:
    """How the model numbers positions when it is given none."""
    for part in module.modules():
        padding = getattr(part, "padding_idx", None)
        if type(part).__name__.endswith("Embeddings") and padding is not None and _counts_ids(part):
            return Numbering(padding + 1, padding)
        if counts_unpadded(part):
            return Numbering(0, part.pad_index)
        if grows_by_itself(part):
            return Numbering(0, part.padding_idx)
        if hasattr(sys.modules[type(part).__module__], MASK_FROM_IDS) and hasattr(part, "config"):
            return Numbering(0, part.config.pad_token_id)
    return Numbering()


def counts_unpadded(part: torch.nn.Module) -> bool:
    """Does it take the number of its ids that are not padding for the sequence's length (XLM, Flaubert)?"""
    return (
        hasattr(part, "pad_index")
        and hasattr(part, "causal")
        and hasattr(sys.modules[type(part).__module__], MASKS_FROM_LENGTHS)
    )


def grows_by_itself(part: torch.nn.Module) -> bool:
    """Is this a table of sinusoids that grows, for positions counted over the ids that are not padding (M2M100)?"""
    if not type(part).__name__.endswith(GROWING_TABLE) or getattr(part, "padding_idx", None) is None:
        return False
    takes_positions = "position_ids" in inspect.signature(type(part).forward).parameters
    return not takes_positions and (hasattr(part, "make_weights") or hasattr(part, "make_weight"))


def _counts_ids(part: torch.nn.Module) -> bool:
    return hasattr(part, NUMBERING_FROM_IDS) or hasattr(
        sys.modules[type(part).__module__], NUMBERING_FROM_IDS
    )
