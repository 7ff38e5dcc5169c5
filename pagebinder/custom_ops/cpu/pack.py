"""Packing and coding weights of linear layers and experts in C++, many at once, into huge pages, see
linear/packed_weights.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pagebinder.custom_ops.cpu.huge_pages import MemoryFor, new_memory
from pagebinder.custom_ops.linear.packed_weights import (
    CODED_DIMS,
    CODED_INNER,
    DIMS,
    PANEL,
    dtype_of_numbers,
    is_coded,
    packed_shape,
    plain_shape,
)


def pack_all(
    weights: Sequence[torch.Tensor], *, memory_for: MemoryFor | None = None
) -> list[torch.Tensor] | None:
    """weights [N, K] or [E, N, K] bf16 -> packed, in new memory, or what `memory_for` gives. None: it would be too
    much. The core part is loaded."""
    places, _ = (memory_for or new_memory)([w.numel() * w.element_size() for w in weights])
    if len(places) < len(weights):
        return None
    packed = []
    for weight, place in zip(weights, places, strict=True):
        out = place.view(weight.dtype).view(packed_shape(*weight.shape))
        for matrix, to in zip(_matrices(weight.detach(), 2), _matrices(out, DIMS), strict=True):
            torch.ops.pagebinder_cpu.pack_linear_weight(matrix, to)
        packed.append(out)
    return packed


def code_all(
    weights: Sequence[torch.Tensor],
    *,
    shapes: Sequence[tuple[int, ...]] | None = None,
    memory_for: MemoryFor | None = None,
) -> list[torch.Tensor] | None:
    """weights [N, K] or [E, N, K] bf16, K a multiple of 256 -> packed and coded, in new memory. None: it would be too
    much.

    Args:
        shapes: coded_shape(...) of each, where that is known: it takes as long as coding.
        memory_for: gives the memory.
    """
    shapes = shapes or [coded_shape(w) for w in weights]
    places, _ = (memory_for or new_memory)([math.prod(shape) for shape in shapes])
    if len(places) < len(weights):
        return None
    outs = (place.view(shape) for place, shape in zip(places, shapes, strict=True))
    return [code(weight, out) for weight, out in zip(weights, outs, strict=True)]


def code(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """weight [N, K] or [E, N, K] bf16 -> packed and coded, in new memory or in `out`. The core part is loaded."""
    if out is None:
        out = torch.empty(coded_shape(weight), dtype=torch.uint8, device="cpu")
    for matrix, to in zip(_matrices(weight.detach(), 2), _matrices(out, CODED_DIMS), strict=True):
        torch.ops.pagebinder_cpu.code_linear_weight(matrix, to)
    return out


def coded_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """Of the codes of a weight [N, K] or [E, N, K] bf16: its exponents decide how many bytes a block takes."""
    matrices = _matrices(weight.detach(), 2)
    block_bytes = max(torch.ops.pagebinder_cpu.coded_block_bytes(matrix) for matrix in matrices)
    *experts, num_columns, inner = weight.shape
    return *experts, num_columns // PANEL, inner // CODED_INNER, block_bytes


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] of a packed or coded one, or the stack [E, N, K]. The core part is loaded."""
    plain = torch.empty(plain_shape(packed), dtype=dtype_of_numbers(packed), device="cpu")
    coded = is_coded(packed)
    for matrix, to in zip(_matrices(packed, CODED_DIMS if coded else DIMS), _matrices(plain, 2), strict=True):
        if coded:
            matrix = torch.ops.pagebinder_cpu.decode_linear_weight(matrix)
        torch.ops.pagebinder_cpu.unpack_linear_weight(matrix, to)
    return plain


def _matrices(weight: torch.Tensor, dims: int) -> Sequence[torch.Tensor]:
    """A weight, or those of a stack, which has one dimension more."""
    return (weight,) if weight.dim() == dims else weight.unbind()
