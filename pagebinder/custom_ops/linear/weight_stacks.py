"""Stacks of weights [E, N, K], one for each expert, in a format of `weight_formats`: each is quantised by itself.

Codes and scales are those of one weight with E in front: [E, N/32, K/32, 2, bytes] and [E, ...]. A stack is handled
one weight at a time, so that no float32 copy of all of it is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagebinder.custom_ops.linear.weight_formats import packed_shapes, scale_dtype, size_problem
from pagebinder.custom_ops.linear.weight_numbers import dequantize, empty_codes, quantize


def sizes_of(weight: torch.Tensor, transposed: bool = False) -> tuple[int, int]:
    """(N, K) of a weight [N, K], or of a stack [E, N, K], or [E, K, N] if `transposed`."""
    num_columns, inner = weight.shape[-2:]
    return (inner, num_columns) if transposed else (num_columns, inner)


def packed_parts_shapes(weight: torch.Tensor, name: str, transposed: bool = False):
    """Shapes of the packed codes and of the scale of a weight or a stack."""
    codes, scale = packed_shapes(*sizes_of(weight, transposed), name)
    return (*weight.shape[:-2], *codes), (*weight.shape[:-2], *scale)


def quantize_stack(
    weight: torch.Tensor, name: str, transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] or [E, N, K]; [K, N] or [E, K, N] if `transposed` -> (packed codes, scale).

    Raises:
        ValueError: unknown format, or sizes that it cannot pack.
    """
    if weight.dim() == 2:
        return quantize(weight.t() if transposed else weight, name)
    if problem := size_problem(*sizes_of(weight, transposed), name):
        raise ValueError(problem)
    of_codes, of_scale = packed_parts_shapes(weight, name, transposed)
    codes = empty_codes(of_codes, weight.device)
    scale = torch.empty(of_scale, dtype=scale_dtype(name), device=weight.device)
    for expert, matrix in enumerate(matrices(weight, transposed)):
        for to, made in zip((codes[expert], scale[expert]), quantize(matrix, name)):
            to.copy_(made)
    return codes, scale


def dequantize_stack(
    codes: torch.Tensor, scale: torch.Tensor, name: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(packed codes, scale) -> the weight [N, K], or the stack [E, N, K], rounded to `dtype`."""
    if codes.dim() == 4:
        return dequantize(codes, scale, name).to(dtype, copy=True)
    return torch.stack([dequantize(c, s, name).to(dtype) for c, s in zip(codes, scale, strict=True)])


def matrices(weight: torch.Tensor, transposed: bool = False) -> Iterator[torch.Tensor]:
    """The weights [N, K] of a stack, or the one weight."""
    for matrix in weight if weight.dim() == 3 else (weight,):
        yield matrix.t() if transposed else matrix
