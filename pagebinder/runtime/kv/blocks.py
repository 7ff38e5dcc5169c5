"""The pool: physical blocks, reference counts, and the map from prefix hash to block.

    device memory, one allocation          block 0 is the null block: padding in tables, never written
    +---------+---------+---------+-----+-----------+
    |  null   | block 1 | block 2 | ... | block N-1 |      slot = table[pos // B] * B + pos % B
    +---------+---------+---------+-----+-----------+

    state of a block      ref_cnt   in free queue   in hash map
    never used / dirty       0          yes             no
    kept for reuse           0          yes             yes       a hit revives it, an allocation evicts it
    filling                 >=1         no              no
    full                    >=1         no              yes       more requests may share it

    A block is found under the hash of every unit (prefix_match_unit tokens) that it holds, not only of its end:
    | unit 0 | unit 1 | unit 2 | ......  |   keys h0, h1 (inner hashes), h2 (block hash); full later: h3 is added

The pool knows ids and hashes only; bytes, layers and requests belong to the planner and the managers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pagebinder.errors import CacheCapacityError, ConfigError
from pagebinder.runtime.kv.checks import is_int
from pagebinder.runtime.kv.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlocksStored
from pagebinder.runtime.kv.free_queue import FreeBlockQueue, KVCacheBlock, make_blocks


class KVCacheIntegrityError(RuntimeError):
    """The cache's books do not balance: a defect in this package, never the user's doing."""


class BlockPool:
    """`num_blocks` physical blocks (block 0 is the null block, so `num_blocks - 1` are usable).

    Every operation is O(1) per block it touches. Observers are called with a `BlockEvent` after each change
    of what can be hit.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        if not is_int(num_blocks):
            raise ConfigError(f"num_blocks={num_blocks!r}: use a whole number of blocks, at least 2.")
        if num_blocks < 2:
            raise CacheCapacityError(
                f"a KV cache of {num_blocks} blocks holds no token (one block is reserved as padding); "
                "give it more memory (kv_cache_bytes) or at least 2 blocks"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = make_blocks(num_blocks)
        self.null_block = self.blocks[0]
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        self.observers: list[Callable[[BlockEvent], None]] = []
        # One map a group: groups share the pool and the hash chain, but not each other's contents. The keys are the
        # chain's own objects, so a hash costs no memory here and is not hashed again.
        # Duplicates (two requests computed the same prefix at once) are kept side by side: a block table is
        # append-only, so one cannot be merged into the other. The first one inserted serves the hits.
        self._cached: dict[int, dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]]] = defaultdict(dict)

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free_blocks

    @property
    def num_cached_prefixes(self) -> int:
        """Prefix ends that a hit can find, over all groups; a block can hold several."""
        return sum(map(len, self._cached.values()))

    def get_usage(self) -> float:
        """Share of usable blocks that are referenced, 0.0 to 1.0."""
        return 1.0 - self.num_free_blocks / (self.num_blocks - 1)

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Allocate `n` blocks with ref_cnt 1, evicting what they held. Raises ValueError unless 0 <= n <= free."""
        if n < 0:
            raise ValueError(f"{n} blocks wanted: the number must be 0 or more")
        blocks = self.free_queue.popleft_n(n)
        for block in blocks:
            assert block.ref_cnt == 0, f"{block!r} was free but referenced"
            if block.block_hash is not None:
                self._unhash(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add one reference to each block; a free one leaves the queue. Null blocks are skipped."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered: Iterable[KVCacheBlock]) -> None:
        """Drop one reference from each block; `ordered` lists first what is to be evicted first.

        Un-hashed blocks go to the front (reused at once), hashed ones to the back (least recently used).
        """
        worthless: list[KVCacheBlock] = []
        reusable: list[KVCacheBlock] = []
        for block in ordered:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"{block!r} was freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (worthless if block.block_hash is None else reusable).append(block)
        self.free_queue.prepend_n(worthless)
        self.free_queue.append_n(reusable)

    def get_cached_block(self, block_hash: bytes, group_ids: Sequence[int]) -> list[KVCacheBlock] | None:
        """One block per group that holds this prefix, or None unless all groups have it."""
        found: list[KVCacheBlock] = []
        for group_id in group_ids:
            entry = self._cached[group_id].get(block_hash)
            if entry is None:
                return None
            found.append(next(iter(entry.values())) if type(entry) is dict else entry)
        return found

    def cache_full_blocks(
        self, table: Sequence[KVCacheBlock], hashes: Sequence[bytes], start: int, end: int, group_id: int,
        hashes_per_block: int = 1, mask: Sequence[bool] | None = None,
    ) -> None:  # fmt: skip
        """Make blocks [start, end) of a block table reusable.

        `hashes` is the request's chain, `hashes_per_block` entries per block: the last of them covers the
        whole block, the others a part each. Null blocks and those whose `mask[i - start]` is False are left out.
        """
        if not self.enable_caching:
            return
        null, added, per_block = self.null_block, [], hashes_per_block
        for i in range(start, end):
            block = table[i]
            if block is null or (mask is not None and not mask[i - start]):
                continue
            if self._store(block, hashes[i * per_block : (i + 1) * per_block], group_id):
                added.append(i)
        if added and self.observers:
            ids = tuple(table[i].block_id for i in added)
            stored = tuple(hashes[(i + 1) * per_block - 1] for i in added)
            parent = hashes[added[0] * per_block - 1] if added[0] else None
            self._emit(BlocksStored(group_id, ids, stored, parent))

    def cache_partial_block(
        self, block: KVCacheBlock, unit_hashes: Sequence[bytes], group_id: int, parent: bytes | None
    ) -> None:
        """Make the units that a block holds so far reusable. Once it is full, its entries are completed.

        `unit_hashes`: chain hashes of the units from the block's start on; `parent`: of the unit before.
        """
        if (
            self.enable_caching
            and unit_hashes
            and self._store(block, unit_hashes, group_id)
            and self.observers
        ):
            self._emit(BlocksStored(group_id, (block.block_id,), (unit_hashes[-1],), parent))

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget what these blocks hold; they stay where they are (in use or in the queue).

        Raises ValueError, and does nothing, if an id is none of the pool's.
        """
        block_ids = list(block_ids)
        if unknown := [i for i in block_ids if not (is_int(i) and 0 <= i < self.num_blocks)]:
            raise ValueError(f"no such blocks: {unknown}; ids are 0 to {self.num_blocks - 1}")
        for block_id in block_ids:
            if self.blocks[block_id].block_hash is not None:
                self._unhash(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes. Refused (False) while any block but the null block is in use."""
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        for _, _, block in self._entries():
            block.block_hash = block.inner_hashes = None
        self._cached.clear()
        self._emit(AllBlocksCleared())
        return True

    def check_integrity(self, held: Mapping[int, int] | None = None) -> None:
        """Raise KVCacheIntegrityError unless free + used == total and every count, link and hash agrees.

        `held`: block id -> number of block tables it is in, as the managers see it. O(num_blocks).
        """
        free = self.free_queue.get_all_free_blocks()
        free_ids = {block.block_id for block in free}
        in_use = {b.block_id for b in self.blocks if b.ref_cnt > 0}
        require(len(free_ids) == len(free) == self.num_free_blocks, "the free queue's count is off")
        require(not free_ids & in_use, f"free and in use: {sorted(free_ids & in_use)}")
        require(0 not in free_ids | in_use, "the null block is free or referenced")
        require(len(free) + len(in_use) == self.num_blocks - 1, "free + used != total")
        require(all(b.ref_cnt >= 0 for b in self.blocks), "a reference count is negative")
        if held is not None:
            counts = {i: self.blocks[i].ref_cnt for i in in_use}
            wrong = {i for i in counts.keys() | held.keys() if counts.get(i, 0) != held.get(i, 0)}
            require(not wrong, f"reference counts differ from the block tables: {sorted(wrong)}")
        mapped: Counter[int] = Counter()
        for group_id, key, block in self._entries():
            is_own = key in _keys(block) and block.group_id == group_id
            require(is_own, f"{block!r} is mapped under another hash")
            mapped[block.block_id] += 1
        hashed = {b.block_id: len(_keys(b)) for b in self.blocks if b.block_hash or b.inner_hashes}
        wrong = {i for i in mapped.keys() | hashed.keys() if mapped.get(i) != hashed.get(i)}
        require(not wrong, f"hashed but not in the map, or the reverse: {sorted(wrong)}")

    def _store(self, block: KVCacheBlock, unit_hashes: Sequence[bytes], group_id: int) -> bool:
        """Add the keys that the block lacks; False if it has them all. Its present ones must be among them."""
        known = 0
        if block.block_hash is not None:
            known = self._num_known_units(block, unit_hashes, group_id)
            if known == len(unit_hashes):
                return False
        assert block is not self.null_block, "the null block holds nothing"
        block.block_hash, block.group_id = unit_hashes[-1], group_id
        if len(unit_hashes) > 1:
            block.inner_hashes = list(unit_hashes[:-1])
        cached = self._cached[group_id]
        for key in unit_hashes[known:] if known else unit_hashes:
            entry = cached.setdefault(key, block)
            if type(entry) is dict:
                entry[block.block_id] = block
            elif entry is not block:
                cached[key] = {entry.block_id: entry, block.block_id: block}
        return True

    @staticmethod
    def _num_known_units(block: KVCacheBlock, unit_hashes: Sequence[bytes], group_id: int) -> int:
        """How many of the units a hashed block is found under: the first ones."""
        keys = _keys(block)
        known = min(len(keys), len(unit_hashes))
        assert keys[known - 1] == unit_hashes[known - 1] and block.group_id == group_id, (
            f"block {block.block_id} already has a hash of other contents"
        )
        return known

    def _unhash(self, block: KVCacheBlock) -> None:
        last, keys, cached = block.block_hash, _keys(block), self._cached[block.group_id]
        block.block_hash = block.inner_hashes = None
        for key in keys:
            entry = cached[key]
            if type(entry) is dict:
                del entry[block.block_id]
            if entry is block or not entry:
                del cached[key]
        if self.observers:
            self._emit(BlockRemoved(block.group_id, block.block_id, last))

    def _entries(self) -> Iterator[tuple[int, bytes, KVCacheBlock]]:
        """Everything in the maps: (group id, hash, block)."""
        for group_id, cached in self._cached.items():
            for key, entry in cached.items():
                for block in entry.values() if type(entry) is dict else (entry,):
                    yield group_id, key, block

    def _emit(self, event: BlockEvent) -> None:
        for observer in self.observers:
            observer(event)


def _keys(block: KVCacheBlock) -> tuple[bytes, ...]:
    """All hashes that a block is found under."""
    return (*(block.inner_hashes or ()), block.block_hash)


def require(condition: bool, problem: str) -> None:
    """Integrity check: unlike `assert`, it stays in force under `python -O`."""
    if not condition:
        raise KVCacheIntegrityError(f"KV-cache books do not balance: {problem}")
