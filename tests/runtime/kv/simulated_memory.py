"""A cache without numbers: every slot remembers what was written to it, so that each read can be judged.

    content of a slot    (group, identity of the prefix that ends at its token)
    content of a state   (group, identity of the prefix that it is the state of)

`run_step` does what the device does: swaps, copies, then each layer kind's writes and reads of the scheduled tokens
through the block tables. A stale, foreign, lost or overwritten slot shows as another identity. Nothing is ever
erased, as in real memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pagebinder.runtime.kv import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    KVCacheManager,
    RecurrentSpec,
    RingSpec,
    SlidingWindowSpec,
)
from pagebinder.runtime.request import Request


@dataclass
class RunningStep:
    """What a step in flight has read: (block, key, content) that nobody may change before it is finished."""

    number: int
    reads: list[tuple[int, object, object]] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)


class SimulatedMemory:
    """Device blocks and host slots of one `KVCacheManager`."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.blocks: dict[int, dict] = {}
        self.slots: dict[int, dict] = {}
        self._identities: dict[Request, list[int]] = {}
        self.counts: Counter[str] = Counter()

    def identities(self, request: Request) -> list[int]:
        """Per token of a request, what identifies the prefix that it ends."""
        known = self._identities.setdefault(request, [])
        last = known[-1] if known else hash((request.cache_salt, request.adapter, request.encoder_hash))
        media = {p: (name, p - start) for name, start, end in request.media for p in range(start, end)}
        for position in range(len(known), request.num_tokens):
            last = hash((last, request.all_token_ids[position], media.get(position)))
            known.append(last)
        return known

    def forget(self, request: Request) -> None:
        self._identities.pop(request, None)

    def run_copies(self) -> list[int]:
        """Run what the manager has recorded, in the engine's order. Returns the blocks that were copied from."""
        swaps, copies = self.kv.take_swaps(), self.kv.take_copies()
        assert [s.to_host for s in swaps] == sorted((s.to_host for s in swaps), reverse=True)
        for swap in swaps:
            assert swap.block != 0
            if swap.to_host:
                self.slots[swap.slot] = dict(self.blocks.get(swap.block, {}))
            else:
                self.blocks[swap.block] = dict(self.slots[swap.slot])
        for copy in copies:
            assert copy.dst != 0 and copy.src not in (0, copy.dst)
            self.blocks[copy.dst] = dict(self.blocks.get(copy.src, {}))
        self.counts["swaps"] += len(swaps)
        self.counts["copies"] += len(copies)
        return [copy.src for copy in copies]

    def run_step(self, items: list[tuple[Request, int, int]], number: int = 0) -> RunningStep:
        """Compute tokens [start, start + count) of each (request, start, count). Returns what was read."""
        step = RunningStep(number, sources=self.run_copies())
        holders = [
            Counter(block.block_id for table in manager.tables.values() for block in table.live_blocks)
            for manager in self.kv.managers
        ]
        reads = []
        for request, start, count in items:
            for group, users in enumerate(holders):
                reads.append((request, group, self._compute(request, group, start, start + count, users)))
        # All writes of the step come before these reads, so a write into a block of another request is seen.
        for request, group, wanted in reads:
            for block, key, content in wanted:
                assert block != 0, f"{request} needs {key} of group {group}, which lies in the null block"
                found = self.blocks.get(block, {}).get(key)
                assert found == content, f"{request}, group {group}, block {block}: {key} holds {found}"
                step.reads.append((block, key, content))
        return step

    def finish(self, step: RunningStep) -> None:
        """Call before `step_finished`: nothing that the step reads may have changed while it was in flight."""
        for block, key, content in step.reads:
            assert self.blocks[block][key] == content, f"block {block} was reused under step {step.number}"
        for block in step.sources:
            assert self.kv.pool.blocks[block].ref_cnt > 0, (
                f"source {block} was freed under step {step.number}"
            )

    # Kinds

    def _compute(self, request: Request, group: int, start: int, end: int, users: Counter) -> list:
        """Write the tokens of one request in one group; returns the reads that must hold after all writes."""
        spec = self.kv.groups[group].spec
        table = self.kv.tables[group].data[self.kv.rows.row_of[request.request_id]]
        args = (request, group, spec, table, start, end, users)
        if isinstance(spec, RecurrentSpec):
            return self._recurrent(*args)
        if isinstance(spec, RingSpec):
            return self._ring(*args)
        if isinstance(spec, CrossAttentionSpec):
            return self._cross(*args)
        return self._attention(*args)

    def _write(self, block: int, key, content, users: Counter) -> None:
        assert block != 0, f"{content} would be written to the null block"
        assert users[block] == 1, f"block {block} is written, but {users[block]} tables hold it"
        assert self.kv.pool.blocks[block].block_hash is None or key != "state", "a checkpoint is overwritten"
        self.blocks.setdefault(block, {})[key] = content

    def _attention(self, request, group, spec, table, start, end, users) -> list:
        size, names = spec.block_size, self.identities(request)
        for p in range(start, end):
            self._write(int(table[p // size]), p % size, (group, names[p]), users)
        first = 0
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, start - spec.window + 1)
        elif isinstance(spec, ChunkedLocalSpec):
            first = start // spec.chunk * spec.chunk
        return [(int(table[p // size]), p % size, (group, names[p])) for p in range(first, end)]

    def _recurrent(self, request, group, spec, table, start, end, users) -> list:
        size, names = spec.block_size, self.identities(request)
        if start:
            block = int(table[(start - 1) // size])
            found = self.blocks.get(block, {}).get("state")
            assert block and found == (group, names[start - 1]), (
                f"{request} starts from {found} in block {block}"
            )
        for p in sorted({end, *range(start // size * size + size, end + 1, size)}):
            block = int(table[(p - 1) // size])
            if block or p == end:
                self._write(block, "state", (group, names[p - 1]), users)
        return []

    def _ring(self, request, group, spec, table, start, end, users) -> list:
        block, names = int(table[0]), self.identities(request)
        since = start // spec.resume_multiple * spec.resume_multiple if spec.resume_multiple else 0
        for p in range(max(since, start - spec.rows), start):
            found = self.blocks.get(block, {}).get(p % spec.rows)
            assert found == (group, names[p]), f"{request}: ring row of token {p} holds {found}"
        for p in range(start, end):
            self._write(block, p % spec.rows, (group, names[p]), users)
        return []

    def _cross(self, request, group, spec, table, start, end, users) -> list:
        size = spec.block_size
        contents = [
            (int(table[p // size]), p % size, (group, request.encoder_hash, p))
            for p in range(request.num_encoder_tokens)
        ]
        if self.kv.needs_encoder(request.request_id):
            for block, key, content in contents:
                self._write(block, key, content, users)
        return contents


def longest_resumable(kv: KVCacheManager, request: Request) -> int:
    """What `find_prefix` should find, by trying every length in every group on its own."""
    lengths = range(0, request.num_tokens, kv.alignment)
    return max(n for n in lengths if all(_can_resume(kv, g, request, n) for g in range(len(kv.groups))))


def _can_resume(kv: KVCacheManager, group: int, request: Request, n: int) -> bool:
    spec, unit = kv.groups[group].spec, kv.hasher.hash_block_size
    size = spec.block_size

    def cached(end: int) -> bool:
        if end // unit > len(request.block_hashes):
            return False  # a cache that can never be resumed from hashes nothing
        return kv.pool.get_cached_block(request.block_hashes[end // unit - 1], [group]) is not None

    if n == 0 or isinstance(spec, CrossAttentionSpec):
        return True
    if isinstance(spec, RingSpec):
        return spec.resume_multiple is not None and n % spec.resume_multiple == 0
    if isinstance(spec, RecurrentSpec):
        return n % size == 0 and cached(n)
    first = 0
    if isinstance(spec, SlidingWindowSpec):
        first = max(0, n - spec.window + 1)
    elif isinstance(spec, ChunkedLocalSpec):
        first = n // spec.chunk * spec.chunk
    ends = sorted({min(n, (p // size + 1) * size) for p in range(first, n)})
    return all(cached(end) for end in ends)
