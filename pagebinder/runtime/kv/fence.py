"""Holds what a step in flight still uses, until that step has finished.

    schedule 7 -- free(block 5) -- schedule 8 ---- finish 7 ------------ finish 8
         |             |                              |
         |             +-- waits for step 7 ----------+-> free queue
         +-- copy from block 3, runs in step 7: block 3 waits for step 7, too

A waiting block keeps a reference, so it can be neither handed out nor evicted, and a hit on it is like any other.
All references are given back here, so that no copy outlives the last reference of its destination (`copies.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagebinder.runtime.kv.blocks import BlockPool, KVCacheBlock, require
from pagebinder.runtime.kv.copies import PendingCopies


@dataclass(slots=True, eq=False)
class HeldForCopy:
    """Something that the step `waits_for` copies from, into the blocks `into`; `release` gives it back."""

    waits_for: int
    into: tuple[int, ...]
    release: Callable[[], None]


class StepFence:
    """Which steps are in flight, and what goes back when they have finished. O(1) per block."""

    def __init__(self, pool: BlockPool, copies: PendingCopies | None = None) -> None:
        self.pool = pool
        self.copies = PendingCopies() if copies is None else copies
        # References that this fence holds, by block id. They do not count as users of the block.
        self.pins: Counter[int] = Counter()
        self._last = 0
        self._in_flight: set[int] = set()
        self._freed: dict[int, list[KVCacheBlock]] = {}
        self._held: list[HeldForCopy] = []

    def step_started(self) -> int:
        """The next step was handed to the device; returns its number."""
        self._last += 1
        self._in_flight.add(self._last)
        return self._last

    def step_finished(self, number: int) -> None:
        """A step's results are in, or it failed. Raises ValueError for a step that is not in flight."""
        if number not in self._in_flight:
            raise ValueError(f"step {number} is not in flight")
        self._in_flight.remove(number)
        if not self._freed and not self._held:
            return
        horizon = min(self._in_flight, default=self._last + 1)
        for waits_for in sorted(n for n in self._freed if n < horizon):
            self._unpin(self._freed.pop(waits_for))
        # A step that failed before it took its copies leaves them to the next one.
        done = [h for h in self._held if h.waits_for < horizon and not self.copies.are_pending(h.into)]
        self._release(done)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def free(self, ordered: Iterable[KVCacheBlock]) -> None:
        """Drop one reference of each block, first evicted first, once no step in flight can use it."""
        if self._in_flight:
            blocks = [block for block in ordered if not block.is_null]
            self.pins.update(block.block_id for block in blocks)
            self._freed.setdefault(self._last, []).extend(blocks)
        else:
            self._give_back(ordered)

    def free_source(self, block: KVCacheBlock, dst: KVCacheBlock) -> None:
        """Drop a reference of a block once the next step, which copies it to `dst`, has finished."""
        self.pins[block.block_id] += 1
        self.hold_for_copy((dst.block_id,), lambda: self._unpin([block]))

    def hold_for_copy(self, into: tuple[int, ...], release: Callable[[], None]) -> None:
        """Call `release` when the next step, which copies into these blocks, has finished."""
        self._held.append(HeldForCopy(self._last + 1, into, release))

    def copies_are_taken(self) -> None:
        """Call before pending copies are taken: they run in the step that was started last, or in the next one if
        that was before they were recorded."""
        for held in self._held:
            if held.waits_for < self._last and self.copies.are_pending(held.into):
                held.waits_for = self._last

    def is_shared(self, block: KVCacheBlock) -> bool:
        """Whether more than one table uses the block."""
        return block.ref_cnt > 1 and block.ref_cnt - self.pins.get(block.block_id, 0) > 1

    @property
    def num_deferred_blocks(self) -> int:
        """Blocks that nobody but the fence holds. O(blocks held)."""
        return sum(self.pool.blocks[i].ref_cnt == n for i, n in self.pins.items())

    def check_integrity(self) -> None:
        """Raise KVCacheIntegrityError if a pending copy's source or destination could be handed out."""
        self.copies.check_integrity(self.pool)
        loose = sorted(block for block in self.copies.sources.values() if self.pins[block] < 1)
        require(not loose, f"sources of pending copies are not held: {loose}")
        lost = self.copies.awaited.difference(*(held.into for held in self._held))
        require(not lost, f"nobody waits for the copies into {sorted(lost)}")

    def _give_back(self, ordered: Iterable[KVCacheBlock]) -> None:
        """Drop one reference of each block. What nobody holds any more is not filled any more either."""
        if not self.copies:
            self.pool.free_blocks(ordered)
            return
        blocks = list(ordered)
        self.pool.free_blocks(blocks)
        unused = {block.block_id for block in blocks if block.ref_cnt == 0}
        forgotten = {block_id for block_id in unused if self.copies.forget(block_id)}
        if forgotten:
            self.pool.evict_blocks(forgotten)
            self._copies_are_forgotten(forgotten)

    def _copies_are_forgotten(self, into: set[int]) -> None:
        """Give back what was held for these copies alone."""
        idle = [h for h in self._held if not into.isdisjoint(h.into) and not self.copies.are_pending(h.into)]
        if not self._in_flight:
            self._release(idle)
            return
        for held in idle:
            # No step will make that copy, but one in flight may use the block for another request.
            held.waits_for, held.into = self._last, ()

    def _release(self, done: list[HeldForCopy]) -> None:
        """They are taken out first: what one holds may be the destination of a copy for which more is held."""
        if done:
            gone = set(done)
            self._held = [held for held in self._held if held not in gone]
        for held in done:
            held.release()

    def _unpin(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            if self.pins[block.block_id] > 1:
                self.pins[block.block_id] -= 1
            else:
                del self.pins[block.block_id]
        self._give_back(blocks)
