"""The memory behind all KV caches: one allocation, seen by every layer through its own strided view.

    block 0 (null)       block 1              block 2
    |p0|p1|p2|p3|pad|    |p0|p1|p2|p3|pad|    |p0|p1|p2|p3|pad|     p_i: page of the layer in slot i of the group
     <---- bytes_per_block ---->

    view of a layer's tensor [N, *shape]: offset = its page's offset, stride over N = bytes_per_block

A layer whose state is several tensors has them one after the other in its page. A block belongs to one group at a
time, so layers of different groups alias the same bytes in different blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagebinder.custom_ops.cpu.huge_pages import advise_huge_pages
from pagebinder.custom_ops.layer_state import CacheTensor, LayerState
from pagebinder.errors import CacheCapacityError
from pagebinder.runtime.kv import KVPlan


class KVArena:
    """`num_blocks` blocks on one device. `caches` maps "kv_cache_<layer number><suffix>" to the view of that
    tensor of the layer."""

    def __init__(
        self, plan: KVPlan, states: Sequence[LayerState], num_blocks: int, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block = plan.bytes_per_block
        num_bytes = num_blocks * plan.bytes_per_block
        try:
            self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:
            raise CacheCapacityError(
                f"The KV cache of {num_blocks:,} blocks ({num_bytes / 2**30:,.1f} GiB) cannot be allocated on "
                f"{device}; give fewer kv_cache_bytes or num_kv_blocks."
            ) from error
        advise_huge_pages(self.memory)  # zeros are not touched yet where they are many
        self.caches: dict[str, torch.Tensor] = {}
        for state, page in zip(states, plan.layers, strict=True):
            offset = page.offset_bytes
            for tensor in state.tensors(plan.groups[page.group].block_size):
                self.caches[f"kv_cache_{state.index}{tensor.suffix}"] = self._view(tensor, offset)
                offset += tensor.num_bytes

    def _view(self, tensor: CacheTensor, offset_bytes: int) -> torch.Tensor:
        dtype = getattr(torch, tensor.dtype)
        strides = torch.empty(tensor.shape, device="meta").stride()
        return self.memory.view(dtype).as_strided(
            (self.num_blocks, *tensor.shape),
            (self.bytes_per_block // dtype.itemsize, *strides),
            offset_bytes // dtype.itemsize,
        )

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()
