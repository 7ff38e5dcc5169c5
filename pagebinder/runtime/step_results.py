"""A finished step's results, matched with the rows that its requests have now.

While a step is in flight requests may be aborted, and the last row moves to where one ended. Nearly always nothing
moved, and the step's rows are the batch's first R rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagebinder.runtime.running_batch import RunningBatch
from pagebinder.runtime.scheduler_output import SchedulerOutput

HELD = -1


class StepResults(NamedTuple):
    """rows, counts: rows that computed something and how many tokens. sampling_rows, tokens: [L] int64, who gets
    which new token; requests that are held or gone are left out. Rows are a slice where they are all of the batch's.
    """

    rows: np.ndarray | slice
    counts: np.ndarray
    sampling_rows: np.ndarray | slice
    tokens: np.ndarray


def resolve(
    output: SchedulerOutput, sampled: Mapping[str, int] | Sequence[int], ends: Collection[str], batch: RunningBatch
) -> StepResults:  # fmt: skip
    """Raises ValueError if tokens are missing (a request in `ends` need not have one)."""
    if not isinstance(sampled, np.ndarray) and isinstance(sampled, Mapping):
        tokens = _tokens_by_id(output, sampled, ends)
    else:
        tokens = np.asarray(sampled, np.int64)
        if tokens.shape != output.sampling.shape:
            raise ValueError(
                f"{len(output.sampling)} requests sample, but there are tokens of shape {tokens.shape}"
            )
    rows, counts, sampling = slice(0, len(output.counts)), output.counts, output.sampling
    if output.moves != batch.moves:
        now = np.array([_row_now(request, batch) for request in output.requests], np.int64)
        rows, counts, sampling = now[now >= 0], counts[now >= 0], now[sampling]
    elif len(tokens) == len(batch) == len(counts) and tokens.min(initial=0) >= 0:
        return StepResults(rows, counts, rows, tokens)
    keep = (tokens >= 0) & (sampling >= 0)
    return StepResults(rows, counts, sampling[keep], tokens[keep])


def _tokens_by_id(output: SchedulerOutput, sampled: Mapping[str, int], ends: Collection[str]) -> np.ndarray:
    requests = [output.requests[row] for row in output.sampling.tolist()]
    known = sampled.keys() | set(ends)
    missing = [r.request_id for r in requests if not r.is_finished and r.request_id not in known]
    if missing:
        raise ValueError(f"no sampled token for {', '.join(missing)}")
    return np.array([sampled.get(r.request_id, HELD) for r in requests], np.int64)


def _row_now(request, batch: RunningBatch) -> int:
    """The request's row, -1 if it is gone; its id may belong to a new request meanwhile."""
    return -1 if request.is_finished else batch.rows.row_of.get(request.request_id, -1)
