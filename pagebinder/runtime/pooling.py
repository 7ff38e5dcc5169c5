"""Rows of a packed batch -> one vector for each sequence."""

from __future__ import annotations

import torch


def pool(rows_TC: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, how: str) -> torch.Tensor:
    """One vector for each sequence of a packed batch.

    Args:
        rows_TC: [T, C]. starts, lengths: [R] int64, where each sequence begins and how long it is, at least 1.
        how: "mean", "max", "cls" (the first row) or "lasttoken".
    Returns:
        [R, C] float32.
    """
    if how == "cls":
        return rows_TC[starts].float()
    if how == "lasttoken":
        return rows_TC[starts + lengths - 1].float()
    return torch.segment_reduce(rows_TC.float(), how, lengths=lengths, axis=0)
