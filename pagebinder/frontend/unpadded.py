"""What a model is told of a sequence without padding, so that its code need not find it out from ids or rows.

    XLM, Flaubert   mask = arange(T) < (ids != pad_index).sum()       attention_mask of ones: the same without padding
    BigBird         token types cut from a buffer of T zeros          token types of zeros

Sequences here have no padding, and are all of token type zero, as when the model is given nothing but its ids. XLM
takes its token types for ids and adds their embeddings, so it gets none.
"""

from __future__ import annotations

import torch

from pagebinder.frontend.numbering import counts_unpadded

# Embeddings whose model cuts `token_type_ids`, a buffer of zeros, to the number of rows.
TYPES_BY_ROW = {"BigBirdEmbeddings"}
# Embeddings of several token types each, that are zeros if none are given.
SEVERAL_TYPES = {"TapasEmbeddings"}


def said_for_unpadded(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Arguments for `model` besides its ids [1, T]; none for most."""
    parts = list(model.modules())
    said = {}
    if any(counts_unpadded(part) for part in parts):
        said |= {"attention_mask": torch.ones_like(ids), "token_type_ids": None}
    if any(type(part).__name__ in TYPES_BY_ROW for part in parts):
        said["token_type_ids"] = torch.zeros_like(ids)
    if any(type(part).__name__ in SEVERAL_TYPES for part in parts):
        said["token_type_ids"] = None
    return said
