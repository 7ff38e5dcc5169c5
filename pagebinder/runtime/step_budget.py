"""A step's tokens: how many every running request computes, and the blocks for them.

best first      A   B   C    D    E             want    1  1  2000  300  1      budget 1024, no chunk limit
                                                gets    1  1  1022    0  0
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pagebinder.runtime.kv.coordinator import KVCacheManager
from pagebinder.runtime.request import Request
from pagebinder.runtime.running_batch import RunningBatch

Key = Callable[[Request], tuple]
# Most blocks that a row takes in a group besides those its new tokens fill: two that are begun, a copy on write.
SPARE_BLOCKS = 3


def share_budget(
    batch: RunningBatch, budget: int, chunk_limit: int, key: Key, ahead_flags: int = 0
) -> tuple[np.ndarray, int]:
    """Tokens of every row [R] int64, best first, within the budget and at most `chunk_limit` each; and their sum.
    `ahead_flags`: see `RunningBatch.wanted`."""
    want = batch.wanted(ahead_flags)
    total = int(want.sum())
    if total <= budget and (chunk_limit >= budget or int(want.max(initial=0)) <= chunk_limit):
        return want, total
    order = batch.order(key)
    want = np.minimum(want[order], chunk_limit)
    before = np.cumsum(want) - want
    counts = np.empty_like(want)
    counts[order] = np.minimum(want, np.maximum(budget - before, 0))
    return counts, int(counts.sum())


def cover(
    kv: KVCacheManager, batch: RunningBatch, short: np.ndarray, counts: np.ndarray, key: Key
) -> int | None:
    """Allocate blocks for the rows `short`; returns the first row that could not get them. Best first, unless
    there are enough for all."""
    rows = short.tolist()
    now = batch.now()
    starts, planned = now.computed[short].tolist(), now.planned[short].tolist()
    ends = (now.planned[short] + counts[short]).tolist()
    requests = [now.by_row[row] for row in rows]
    if len(rows) > 1 and kv.num_free_blocks < _enough_blocks(kv, len(rows), sum(ends) - sum(starts)):
        order = sorted(range(len(rows)), key=lambda i: key(requests[i]))
        short = short[order]
        lists = (rows, requests, starts, ends, planned)
        rows, requests, starts, ends, planned = ([x[i] for i in order] for x in lists)
    covered = kv.allocate_batch(requests, starts, ends, planned)
    now.covered[short[: len(covered)]] = covered
    return None if len(covered) == len(rows) else rows[len(covered)]


def _enough_blocks(kv: KVCacheManager, num_rows: int, num_tokens: int) -> int:
    """No so many rows take more blocks than this for so many tokens."""
    return len(kv.groups) * (num_tokens // kv.smallest_block + SPARE_BLOCKS * num_rows)
