"""A step's tokens: how many every running request computes, and the blocks for them.

best first      A   B   C    D    E             want    1  1  2000  300  1      budget 1024, no chunk limit
                                                gets    1  1  1022    0  0
                                                gets    1  1   512    0  1      ... 512 prompt tokens beside decodes

Tokens that see each other (parts of an image) are computed in one step: where a share would cut such a range it ends
ahead of it, and a range that is next is taken as a whole, whatever limits stand besides the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pagebinder.runtime.kv.coordinator import KVCacheManager
from pagebinder.runtime.request import Request
from pagebinder.runtime.running_batch import RunningBatch

Key = Callable[[Request], tuple]
# Most blocks that a row takes in a group besides those its new tokens fill: two that are begun, a copy on write.
SPARE_BLOCKS = 3


class Shares(NamedTuple):
    """`counts`: tokens of every running row, [R] int64. `total`: their sum. `left`: what requests may take that begin
    in this step, and `room` what a range may that is computed as a whole."""

    counts: np.ndarray
    total: int
    left: int
    room: int


def share_budget(
    batch: RunningBatch, budget: int, chunk_limit: int, key: Key, ahead_flags: int = 0, mixed_prefill: int = 0
) -> Shares:
    """Every running row's tokens, best first, within the budget and at most `chunk_limit` each.

    `mixed_prefill`: most prompt tokens while some row decodes (0: no limit), so that decodes do not wait long for
    their step and go along in many of them. `ahead_flags`: see `RunningBatch.wanted`.
    """
    want = batch.wanted(ahead_flags)
    total, most = int(want.sum()), int(want.max(initial=0))
    mixed = mixed_prefill and len(want) and int(want.min()) <= 1
    prompt_limit = min(budget, mixed_prefill) if mixed else budget
    prompt_tokens = int(want[want > 1].sum()) if most > 1 else 0
    if total <= budget and most <= chunk_limit and prompt_tokens <= prompt_limit:
        return Shares(want, total, min(budget - total, prompt_limit - prompt_tokens), budget - total)
    order = batch.order(key)
    if batch.has_whole_ranges():
        return _with_whole_ranges(batch, order.tolist(), want, budget, prompt_limit, chunk_limit)
    want = np.minimum(want[order], chunk_limit)
    is_prompt = want > 1
    want = np.where(is_prompt, _first_come(want * is_prompt, prompt_limit), want)
    counts = np.empty_like(want)
    counts[order] = want = _first_come(want, budget)
    total, prompt_tokens = int(want.sum()), int(want[is_prompt].sum())
    return Shares(counts, total, min(budget - total, prompt_limit - prompt_tokens), budget - total)


def _with_whole_ranges(
    batch: RunningBatch, order: list[int], want: np.ndarray, budget: int, prompt_limit: int, chunk_limit: int
) -> Shares:
    """As `share_budget`, row by row."""
    now, counts, left = batch.now(), np.zeros_like(want), budget
    for row in order:
        wanted = int(want[row])
        count = min(wanted, chunk_limit, left)
        if wanted > 1:
            count = max(min(count, prompt_limit), 0)
            count = now.by_row[row].fit_chunk(int(now.planned[row]), count, left) if count else 0
            prompt_limit -= count
        counts[row] = count
        left -= count
    return Shares(counts, budget - left, max(min(left, prompt_limit), 0), left)


def _first_come(want: np.ndarray, budget: int) -> np.ndarray:
    """What is wanted [R], as far as the budget goes, in the order of the rows."""
    return np.minimum(want, np.maximum(budget - (np.cumsum(want) - want), 0))


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
