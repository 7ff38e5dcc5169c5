"""Follows a pool through a run and writes one `StepRecord` per step.

    pool events (stored, removed, cleared) ----> hashed blocks ---+
    block tables of the step's requests --diff--> block holders --+--> BlockLedger --> StepRecord

A block's holders follow from what changed in the tables of the requests that were scheduled, came or went, so a
step costs time in those requests and in the blocks that changed hands, not in the pool or the context. Nothing in
the pool or the managers is instrumented; without a recorder a run costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pagebinder.runtime.kv.block_ledger import BlockLedger
from pagebinder.runtime.kv.blocks import AllBlocksCleared, BlockEvent, BlockRemoved, BlocksStored
from pagebinder.runtime.kv.event_log import GroupFacts, KVEventLog, StepRecord
from pagebinder.runtime.kv.specs import CrossAttentionSpec, KVCacheGroup, RecurrentSpec, RingSpec

if TYPE_CHECKING:
    from pagebinder.runtime.request import Request
    from pagebinder.runtime.scheduler import Scheduler
    from pagebinder.runtime.scheduler_output import SchedulerOutput

# Single blocks are followed in pools of at most so many: more rows than that no picture can show.
MAX_FOLLOWED_BLOCKS = 256
# Name in the record -> name in the scheduler's statistics.
COUNTERS = {
    "queried_tokens": "prefix_queried_tokens",
    "hit_tokens": "prefix_hit_tokens",
    "preemptions": "num_preemptions",
    "swaps_out": "num_swaps_out",
    "swaps_in": "num_swaps_in",
}


class _Holder:
    """A request that holds blocks. `num_tokens` are stored once the present step has run.

    `tables`: per group, logical index -> block id, in the order of the indices.
    """

    __slots__ = ("num_tokens", "request", "tables")

    def __init__(self, request: Request, num_groups: int) -> None:
        self.request = request
        self.num_tokens = 0
        self.tables: list[dict[int, int]] = [{} for _ in range(num_groups)]


class KVEventRecorder:
    """Attach to a scheduler, call `record_step` after each `schedule()`; `log` grows by one record each time.

    `bytes_per_block` goes into the log's header. `follow_blocks`: also note who owns each single block (None: if
    the pool has at most MAX_FOLLOWED_BLOCKS blocks). `detach` ends the recording.
    """

    def __init__(
        self, scheduler: Scheduler, *, bytes_per_block: int = 0, follow_blocks: bool | None = None
    ) -> None:
        self.scheduler, self.kv, self.pool = scheduler, scheduler.kv, scheduler.kv.pool
        if follow_blocks is None:
            follow_blocks = self.pool.num_blocks <= MAX_FOLLOWED_BLOCKS
        facts = tuple(map(_facts, self.kv.groups))
        self.log = KVEventLog(self.pool.num_blocks, facts, bytes_per_block, follow_blocks)
        self.ledger = BlockLedger(len(facts))
        self._held: dict[str, _Holder] = {}
        self._scan_pool()
        self._before = self._counters()
        self._started = time.perf_counter()
        self.pool.observers.append(self._observe)

    def detach(self) -> KVEventLog:
        """Stop following the pool; returns the log."""
        self.pool.observers.remove(self._observe)
        return self.log

    def record_step(self, output: SchedulerOutput) -> None:
        """Note the pool as the step `output` finds it. Call between `schedule()` and the next change."""
        starts, ends = output.starts.tolist(), (output.starts + output.counts).tolist()
        rows = list(zip(output.requests, starts, ends))
        here = {request.request_id: request for request in output.requests}
        for request_id, holder in list(self._held.items()):
            # The same id may come back as another request between two steps.
            if here.get(request_id) is not holder.request:
                self._drop(request_id)
        # A fork holds its parent's blocks before it computes anything.
        self._follow([row for row in rows if row[1] < row[2] or row[0].request_id not in self._held])
        self.log.steps.append(self._record(output))

    # Block tables

    def _follow(self, followed: list[tuple[Request, int, int]]) -> None:
        """Take over what changed in the tables of requests whose tokens [start, end) the step computes.

        First what they lost, then what they gained: a block may go from one to the other within a step.
        """
        changed = [(self._holder(request, end), start) for request, start, end in followed]
        # Others may lose what is behind their window, too: when the allocation for them was refused.
        for holder in self._held.values():
            self._take_losses(holder)
        tails = [tail for holder, start in changed for tail in self._tails(holder, start)]
        for tail in tails:
            self._take_changes(*tail)
        for tail in tails:
            self._take_gains(*tail)

    def _holder(self, request: Request, num_tokens: int) -> _Holder:
        holder = self._held.get(request.request_id)
        if holder is None:
            holder = self._held[request.request_id] = _Holder(request, len(self.kv.groups))
        holder.num_tokens = num_tokens
        return holder

    def _tails(self, holder: _Holder, start: int) -> Iterator[tuple[int, _Holder, list[tuple[int, int]]]]:
        """Per group, the (index, block id) pairs that a step which begins at token `start` may have changed."""
        for group_id, manager in enumerate(self.kv.managers):
            ids = manager.tables[holder.request.request_id].ids
            # One block before the first new token may change, too: a recurrent state is read from there.
            first = max(start - 1, 0) // manager.block_size if holder.tables[group_id] else 0
            yield group_id, holder, list(enumerate(ids[first:].tolist(), first))

    def _take_losses(self, holder: _Holder) -> None:
        """Blocks behind a window, which went back in order, and those of a step that was planned and never ran."""
        request_id = holder.request.request_id
        for group_id, known in enumerate(holder.tables):
            if known:
                table = self.kv.managers[group_id].tables[request_id]
                while known and (index := next(iter(known))) < table.first_live:
                    self.ledger.lose(group_id, request_id, known.pop(index))
                while known and (index := next(reversed(known))) >= len(table.blocks):
                    self.ledger.lose(group_id, request_id, known.pop(index))

    def _take_changes(self, group_id: int, holder: _Holder, tail: list[tuple[int, int]]) -> None:
        """Blocks of the tail that were replaced by a copy, or given back."""
        known = holder.tables[group_id]
        for index, block_id in tail:
            if known.get(index, block_id) != block_id:
                self.ledger.lose(group_id, holder.request.request_id, known.pop(index))

    def _take_gains(self, group_id: int, holder: _Holder, tail: list[tuple[int, int]]) -> None:
        known, spec = holder.tables[group_id], self.kv.groups[group_id].spec
        for index, block_id in tail:
            if not block_id:
                continue
            if index not in known:
                self._insert(known, index, block_id)
                self.ledger.gain(group_id, holder.request.request_id, block_id)
            self.ledger.set_gap(group_id, block_id, _gap(spec, holder, index))

    @staticmethod
    def _insert(known: dict[int, int], index: int, block_id: int) -> None:
        in_order = not known or next(reversed(known)) < index
        known[index] = block_id
        if not in_order:  # a replaced block, or a checkpoint that was not wanted at first
            items = sorted(known.items())
            known.clear()
            known.update(items)

    def _drop(self, request_id: str) -> None:
        for group_id, table in enumerate(self._held.pop(request_id).tables):
            for block_id in table.values():
                self.ledger.lose(group_id, request_id, block_id)

    # Prefix cache

    def _observe(self, event: BlockEvent) -> None:
        if isinstance(event, BlocksStored):
            for block_id in event.block_ids:
                self.ledger.set_hashed(block_id, event.group_id)
        elif isinstance(event, BlockRemoved):
            self.ledger.happened["evictions"] += self.pool.blocks[event.block_id].ref_cnt == 0
            self.ledger.set_hashed(event.block_id, None)
        elif isinstance(event, AllBlocksCleared):
            self.ledger.clear_hashes()

    def _scan_pool(self) -> None:
        """What was there before the recording began. O(blocks), once."""
        for block in self.pool.blocks:
            if block.block_hash is not None:
                self.ledger.set_hashed(block.block_id, block.group_id)
        batch = self.scheduler.batch
        self._follow([(request, 0, end) for request, end in zip(batch.by_row, batch.planned.tolist())])
        self.ledger.take_happened()

    # Records

    def _counters(self) -> dict[str, int]:
        return {name: getattr(self.scheduler.stats, source) for name, source in COUNTERS.items()}

    def _record(self, output: SchedulerOutput) -> StepRecord:
        before, self._before = self._before, self._counters()
        ledger, log = self.ledger, self.log
        happened = ledger.take_happened()
        owners = ledger.take_owner_changes() if log.has_owners else ledger.forget_touched() or ()
        slots = tuple(n * group.slots_per_block for n, group in zip(ledger.in_use, log.groups))
        return StepRecord(
            step=len(log.steps),
            time=time.perf_counter() - self._started,
            in_use=tuple(ledger.in_use),
            cached=tuple(ledger.cached),
            free=log.num_usable_blocks - sum(ledger.in_use) - sum(ledger.cached),
            deferred=self.kv.num_deferred_blocks,
            slots=slots,
            tokens=tuple(n - empty for n, empty in zip(slots, ledger.empty_slots)),
            scheduled_tokens=output.total_num_tokens,
            evictions=happened["evictions"],
            allocations=happened["allocations"],
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            owners=owners,
            **{name: count - before[name] for name, count in self._before.items()},
        )


def _gap(spec, holder: _Holder, index: int) -> int:
    """Slots of a request's logical block that hold no token once the step has run."""
    if isinstance(spec, (RecurrentSpec, RingSpec)):
        return 0  # a state of constant size fills its block
    is_cross = isinstance(spec, CrossAttentionSpec)
    filled = holder.request.num_encoder_tokens if is_cross else holder.num_tokens
    return min(max((index + 1) * spec.block_size - filled, 0), spec.block_size)


def _facts(group: KVCacheGroup) -> GroupFacts:
    spec = group.spec
    slots = 1 if isinstance(spec, (RecurrentSpec, RingSpec)) else spec.block_size
    return GroupFacts(
        kind=spec.kind, num_layers=len(group.layers), block_size=spec.block_size, slots_per_block=slots
    )
