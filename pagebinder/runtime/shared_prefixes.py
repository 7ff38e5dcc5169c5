"""Which requests of a step begin with the same blocks, and what the graph is told about it.

    block table      0  1  2  3  4          the tree of common blocks           groups, if it saves most
    request 0        7  8  3  5  .              [7 8]            of 0, 1, 3
    request 1        7  8  3  6  .             /     \\
    request 2        9  4  .  .  .          [3]       1 more     of 0, 1         {0, 1}: 3 blocks   or {0, 1, 3}: 2
    request 3        7  8  2  .  .

Equal ids are equal contents: the prefix cache, forks and samples of one prompt share blocks and never write into
what somebody else reads. Only full blocks of computed tokens count. A request reads one prefix in common with others,
so of nested prefixes one level is taken, whichever is worth most by `value`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch


class SharedPrefix(NamedTuple):
    """Rows of requests whose tables begin with the same `num_blocks` blocks."""

    rows: np.ndarray
    num_blocks: int


# How much sharing so many leading blocks between these rows is worth; 0 or less: nothing.
Value = Callable[[np.ndarray, int], float]


def find_shared_prefixes(table: np.ndarray, full_blocks: np.ndarray, value: Value) -> list[SharedPrefix]:
    """Disjoint groups of rows that are worth most together. Time is linear in the entries of the rows that share.

    Args:
        table: [R or more, M] int32 block ids. full_blocks: [R] leading blocks of each row that may be shared.
    """
    rows = np.flatnonzero(full_blocks > 0)
    return _best(table, full_blocks, _by_block(table, rows, 0), value)[1]


def _by_block(table: np.ndarray, rows: np.ndarray, column: int) -> list[np.ndarray]:
    """Rows with the same block in a column, two at least."""
    if len(rows) < 2:
        return []
    ids = table[rows, column]
    order = np.argsort(ids, kind="stable")
    ids, rows = ids[order], rows[order]
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1], [True]]))
    if len(starts) > len(rows):
        return []  # all differ
    return [rows[a:b] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist()) if b - a > 1]


def _best(table, full_blocks, sets, value: Value, column: int = 0) -> tuple[float, list[SharedPrefix]]:
    """The best groups inside each set; rows of a set agree up to `column` and in it."""
    total, chosen = 0.0, []
    for rows in sets:
        most = int(full_blocks[rows].min())
        agrees = (table[rows, column:most] == table[rows[0], column:most]).all(axis=0)
        common = most if agrees.all() else column + int(agrees.argmin())
        deeper = rows[full_blocks[rows] > common]
        below, groups = _best(table, full_blocks, _by_block(table, deeper, common), value, common)
        here = value(rows, common)
        if here > 0 and here >= below:
            below, groups = here, [SharedPrefix(rows, common)]
        total += below
        chosen += groups
    return total, chosen


def order_shared_tokens(
    shared_lens: np.ndarray, shared_leaders: np.ndarray, query_start_loc: np.ndarray, out: np.ndarray
) -> None:
    """Fill `out` [T] with the tokens of the requests that share, leader by leader, then -1."""
    members = np.flatnonzero(shared_lens)
    members = members[np.argsort(shared_leaders[members], kind="stable")]
    counts = query_start_loc[members + 1] - query_start_loc[members]
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    out[:total] = np.repeat(query_start_loc[members] - (ends - counts), counts) + np.arange(total)
    out[total:] = -1


def nothing_shared(num_groups: int, num_reqs: int, num_tokens: int, device) -> Mapping[str, torch.Tensor]:
    """The inputs of a step without common prefixes, for graphs that ask for them."""
    inputs = {}
    for g in range(num_groups):
        none = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        inputs[f"shared_lens_{g}"] = inputs[f"shared_leaders_{g}"] = none
        inputs[f"shared_tokens_{g}"] = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
    return inputs
