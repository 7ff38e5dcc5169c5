"""Swap or recompute: what a preempted request costs either way.

    swap        bytes out + bytes in                        / measured copy rate
    recompute   tokens that the prefix cache will not give  / measured prefill rate

Both rates are measured on this machine: copies when the engine starts and whenever it swaps, prefill over the steps
that computed prompt tokens. How much a preempted request finds again in the prefix cache is learnt from those that
came back. When a request returns the choice is made again, with its actual prefix hit.
"""

from __future__ import annotations

import numpy as np

from pagebinder.runtime.kv import KVCacheManager
from pagebinder.runtime.request import Request

POLICIES = ("auto", "always", "never")
# Weight of the newest sample: about the last twenty count.
SMOOTHING = 0.1


class Rate:
    """Units per second, as a moving average weighted by time."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        self._units += SMOOTHING * (units - self._units)
        self._seconds += SMOOTHING * (seconds - self._seconds)

    @property
    def per_second(self) -> float | None:
        """None as long as nothing was measured."""
        return self._units / self._seconds if self._seconds > 0 else None


class SwapPolicy:
    """Chooses for each preempted request. `policy`: "auto" by the cost model, "always" or "never" swap."""

    def __init__(self, policy: str, bytes_per_block: int) -> None:
        assert policy in POLICIES, policy
        self.policy = policy
        self.bytes_per_block = bytes_per_block
        self.copy_rate = Rate()
        self.compute_rate = Rate()
        self._hit_share = 0.0

    def note_copy(self, num_bytes: int, seconds: float) -> None:
        self.copy_rate.add(num_bytes, seconds)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        self.compute_rate.add(num_tokens, seconds)

    def note_recompute(self, num_tokens: int, num_hit_tokens: int) -> None:
        """A preempted request came back through the prefix cache."""
        self._hit_share += SMOOTHING * (num_hit_tokens / num_tokens - self._hit_share)

    def prefers_swap_out(self, kv: KVCacheManager, request: Request) -> bool:
        """For a request that is about to lose its blocks."""
        if self.policy != "auto":
            return self.policy == "always"
        lost = request.num_computed_tokens * (1.0 - self._hit_share)
        return self._swap_is_cheaper(2 * held_blocks(kv, request), lost)

    def prefers_swap_in(self, image, num_tokens: int, num_hit_tokens: int) -> bool:
        """For a request whose state lies in host memory, with the hit it would otherwise start from."""
        if self.policy != "auto":
            return self.policy == "always"
        return self._swap_is_cheaper(image.num_blocks, image.num_computed_tokens - num_hit_tokens)

    def _swap_is_cheaper(self, num_copies: int, num_tokens: float) -> bool:
        copy, compute = self.copy_rate.per_second, self.compute_rate.per_second
        if copy is None or compute is None:
            return False
        return num_copies * self.bytes_per_block / copy < num_tokens / compute


def held_blocks(kv: KVCacheManager, request: Request) -> int:
    """Blocks that a running request holds, over all groups."""
    return sum(int(np.count_nonzero(ids)) for ids in kv.block_ids(request.request_id))
