"""Packing weights of linear layers with the C++ kernel, many at once, into huge pages: linear/packed_weights.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagebinder.custom_ops.cpu.huge_pages import memory_for
from pagebinder.custom_ops.linear.packed_weights import packed_shape, plain_shape


def pack_all(weights: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """weights [N, K] bf16 -> packed, in new memory. None: it would be too much. The core part is loaded."""
    places, _ = memory_for([w.numel() * w.element_size() for w in weights])
    if len(places) < len(weights):
        return None
    packed = []
    for weight, place in zip(weights, places, strict=True):
        out = place.view(weight.dtype).view(packed_shape(*weight.shape))
        torch.ops.pagebinder_cpu.pack_linear_weight(weight.detach(), out)
        packed.append(out)
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The weight [N, K] of a packed one. The core part is loaded."""
    plain = torch.empty(plain_shape(packed), dtype=packed.dtype)
    torch.ops.pagebinder_cpu.unpack_linear_weight(packed, plain)
    return plain
