"""Who holds each block, kept current change by change; counts per group are always at hand.

block   holders     hashed   counts as
  3     a, b        yes      in use (of its group, once)
  5     -           yes      cached
  7     a           no       in use, with `gap` slots that hold no token yet
  9     -           no       free (and in none of the dicts)
"""

from __future__ import annotations

from collections import Counter

from pagebinder.runtime.kv.event_log import CACHED, FREE, Owner


class BlockLedger:
    """Mirrors a pool from the changes it is told of. Every method is O(1) unless it says otherwise.

    `in_use`, `cached`, `empty_slots`: per group. `happened`: counts since `take_happened`.
    """

    def __init__(self, num_groups: int) -> None:
        self.in_use, self.cached, self.empty_slots = ([0] * num_groups for _ in range(3))
        self.happened: Counter[str] = Counter()
        self._holders: dict[int, dict[str, None]] = {}  # block id -> request ids, first come first
        self._gaps: dict[int, int] = {}  # block id -> its slots without a token
        self._hashed: dict[int, int] = {}  # block id -> group id
        self._owners: dict[int, Owner] = {}
        self._touched: set[int] = set()

    def gain(self, group_id: int, request_id: str, block_id: int) -> None:
        """A request holds one more block. Nobody's and unhashed before means: newly allocated."""
        holders = self._holders.setdefault(block_id, {})
        if not holders:
            self.in_use[group_id] += 1
            if block_id in self._hashed:
                self.cached[self._hashed[block_id]] -= 1
            else:
                self.happened["allocations"] += 1
        holders[request_id] = None
        self._touched.add(block_id)

    def lose(self, group_id: int, request_id: str, block_id: int) -> None:
        """A request holds one block less."""
        holders = self._holders[block_id]
        del holders[request_id]
        self._touched.add(block_id)
        if not holders:
            del self._holders[block_id]
            self.in_use[group_id] -= 1
            self.set_gap(group_id, block_id, 0)
            if block_id in self._hashed:
                self.cached[self._hashed[block_id]] += 1

    def set_gap(self, group_id: int, block_id: int, num_slots: int) -> None:
        """So many slots of a block that is in use hold nothing."""
        self.empty_slots[group_id] += num_slots - self._gaps.pop(block_id, 0)
        if num_slots:
            self._gaps[block_id] = num_slots

    def set_hashed(self, block_id: int, group_id: int | None) -> None:
        """A block can be hit from now on in a group, or (None) no longer."""
        before = self._hashed.pop(block_id, None)
        if group_id is not None:
            self._hashed[block_id] = group_id
        self._touched.add(block_id)
        if block_id not in self._holders:
            if before is not None:
                self.cached[before] -= 1
            if group_id is not None:
                self.cached[group_id] += 1

    def clear_hashes(self) -> None:
        """Nothing can be hit any more. O(hashed blocks)."""
        for block_id in list(self._hashed):
            self.set_hashed(block_id, None)

    def take_happened(self) -> Counter[str]:
        """What happened since the last call."""
        taken, self.happened = self.happened, Counter()
        return taken

    def take_owner_changes(self) -> tuple[tuple[int, Owner], ...]:
        """(block id, owner) where the owner is another one than at the last call. O(blocks that changed)."""
        touched, self._touched = self._touched, set()
        changes: list[tuple[int, Owner]] = []
        for block_id in sorted(touched):
            owner = self._owner(block_id)
            if owner != self._owners.get(block_id, FREE):
                self._owners[block_id] = owner
                changes.append((block_id, owner))
        return tuple(changes)

    def forget_touched(self) -> None:
        """For whoever does not ask for owners: keeps the set of changed blocks from growing."""
        self._touched.clear()

    def _owner(self, block_id: int) -> Owner:
        holders = self._holders.get(block_id)
        if holders:
            return next(iter(holders))
        return CACHED if block_id in self._hashed else FREE
