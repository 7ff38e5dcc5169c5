"""Weights of linear layers as tiles for matrix units: the same numbers in another order, no second copy of them.

    [N, K] bf16  ->  [N/32 panels, K/32 steps, 2 tiles, 16 pairs of k, 16 columns, 2]        K ->  8 4 2 ... a tile is
                                                                                                    1 KB in one piece
A product reads a panel from its begin to its end: at few rows as a stream, which memory is fastest at, at many rows
as operands that no call has to put in order first. linear, linears and gated_linear take weights of either form.
"""

from __future__ import annotations

import torch

PANEL = 32  # columns (N), and k of a step
DIMS = 6


def is_packed(weight: torch.Tensor) -> bool:
    return weight.dim() == DIMS


def can_be_packed(weight: torch.Tensor) -> bool:
    """Is this [N, K] of bf16, with sizes that tiles fill?"""
    return (
        weight.dim() == 2
        and weight.dtype == torch.bfloat16
        and min(weight.shape) > 0
        and not any(n % PANEL for n in weight.shape)
    )


def packed_shape(num_columns: int, inner: int) -> tuple[int, ...]:
    return num_columns // PANEL, inner // PANEL, 2, PANEL // 2, PANEL // 2, 2


def plain_shape(weight: torch.Tensor) -> tuple[int, int]:
    """[N, K] of a weight of either form."""
    return (weight.shape[0] * PANEL, weight.shape[1] * PANEL) if is_packed(weight) else tuple(weight.shape)


def pack(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """weight [N, K] bf16 -> packed, in new memory or in `out`. Raises ValueError where the sizes do not fit."""
    if not can_be_packed(weight):
        raise ValueError(f"{weight.dtype} {tuple(weight.shape)}: bf16 in multiples of {PANEL} is packed")
    if out is None:
        out = torch.empty(packed_shape(*weight.shape), dtype=weight.dtype, device=weight.device)
    n, k, tiles, pairs, columns, two = out.shape
    return out.copy_(weight.detach().view(n, tiles, columns, k, pairs, two).permute(0, 3, 1, 4, 2, 5))


def in_place_of(weight: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The packed form as what the weight is: a parameter or a plain tensor."""
    is_parameter = isinstance(weight, torch.nn.Parameter)
    return torch.nn.Parameter(packed, requires_grad=False) if is_parameter else packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] of a packed one, in new memory."""
    return packed.permute(0, 2, 4, 1, 3, 5).reshape(plain_shape(packed))


def plain(weight: torch.Tensor) -> torch.Tensor:
    """A weight of either form as [N, K]."""
    return unpack(weight) if is_packed(weight) else weight
