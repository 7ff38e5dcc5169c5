"""Block-sized slots in host memory, for requests that were preempted with their state saved.

request "a"    group 0  [ 7 ][ 3 ][ 9 ]         SwapImage    group 0  (0, slot 4) (1, slot 0) (2, slot 1)
(swapped out)  group 1  [ 0 ][ 0 ][ 5 ]    ->                group 1  (2, slot 6)        null: nothing saved
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagebinder.errors import ConfigError
from pagebinder.runtime.kv.retention import Boundaries


class HostBlocks:
    """A free list of `num_slots` host slots, each as large as a block. Raises ConfigError if there are none."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ConfigError(
                f"swap space of {num_slots} blocks holds nothing; give it at least one, or leave it out"
            )
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_slots(self) -> frozenset[int]:
        return frozenset(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """`n` slots, or None (and nothing taken) if there are fewer."""
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]

    def release(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)


@dataclass(frozen=True, slots=True, eq=False)
class SwapImage:
    """A request's state in host memory. `groups`: per group the (logical block, host slot) pairs, in order;
    `tables`: per group the length of the block table, and its `begins_inside`."""

    request_id: str
    num_computed_tokens: int
    groups: tuple[tuple[tuple[int, int], ...], ...]
    tables: tuple[tuple[int, int], ...]
    boundaries: Boundaries
    needs_encoder: bool

    @property
    def num_blocks(self) -> int:
        return sum(len(pairs) for pairs in self.groups)

    @property
    def slots(self) -> list[int]:
        return [slot for pairs in self.groups for _, slot in pairs]
