"""The memory behind all KV caches: one allocation, seen by every layer through its own strided view.

    block 0 (null)       block 1              block 2
    |p0|p1|p2|p3|pad|    |p0|p1|p2|p3|pad|    |p0|p1|p2|p3|pad|     p_i: page of the layer in slot i of the group
     <---- bytes_per_block ---->

    view of a layer [N, G, B, D + Dv]: offset = its page's offset, stride over N = bytes_per_block

A block belongs to one group at a time, so layers of different groups alias the same bytes in different blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagebinder.custom_ops.cpu.huge_pages import advise_huge_pages
from pagebinder.custom_ops.layer_state import AttentionState
from pagebinder.errors import CacheCapacityError
from pagebinder.runtime.kv import KVPlan


class KVArena:
    """`num_blocks` blocks on one device. `caches` maps "kv_cache_<layer number>" to the layer's view."""

    def __init__(
        self, plan: KVPlan, states: Sequence[AttentionState], num_blocks: int, device: torch.device
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
        self.caches = {
            f"kv_cache_{state.index}": self._view(state, page, plan)
            for state, page in zip(states, plan.layers, strict=True)
        }

    def _view(self, state: AttentionState, page, plan: KVPlan) -> torch.Tensor:
        dtype = getattr(torch, state.dtype)
        block_size = plan.groups[page.group].block_size
        width = state.head_dim + state.head_dim_v
        return self.memory.view(dtype).as_strided(
            (self.num_blocks, state.num_kv_heads, block_size, width),
            (plan.bytes_per_block // dtype.itemsize, block_size * width, width, 1),
            page.offset_bytes // dtype.itemsize,
        )

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()
