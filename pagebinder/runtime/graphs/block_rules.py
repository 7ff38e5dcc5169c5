"""Which blocks a step of a loop of one's own reads and writes, by what each KV group keeps.

    window of 20, blocks of 16, the step [40, 42)         entries   0    1    2
    it reads tokens 21 to 41 and writes 40 and 41         table   [ 0 ][ 7 ][ 4 ]     entry 0 may be given back

Block ids are of one pool: all groups share it, and no two of them, and no two sequences, may write one block. What
several sequences only read (a prefix that they share) may be the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagebinder.errors import RequestError
from pagebinder.runtime.kv import KVCacheGroup
from pagebinder.runtime.kv.specs import (
    ChunkedLocalSpec,
    KVCacheSpec,
    RecurrentSpec,
    RingSpec,
    SlidingWindowSpec,
)

Entries = tuple[np.ndarray, np.ndarray]


def first_token_read(spec: KVCacheSpec, starts: np.ndarray) -> np.ndarray:
    """The first token whose state a step from `starts` on reads or writes."""
    if isinstance(spec, SlidingWindowSpec):
        return np.maximum(0, starts - spec.window + 1)
    if isinstance(spec, ChunkedLocalSpec):
        return starts // spec.chunk * spec.chunk
    return np.zeros_like(starts)


def needed_entries(spec: KVCacheSpec, start: int, end: int) -> list[int]:
    """Entries of a sequence's block table that a step which computes its tokens [start, end) reads or writes. All
    others may be 0: of a window those behind it, of a recurrent state all but the one it reads and the one it writes.
    """
    if isinstance(spec, RingSpec):
        return [0]
    last = (end - 1) // spec.block_size
    if isinstance(spec, RecurrentSpec):
        return sorted({max(start - 1, 0) // spec.block_size if start else last, last})
    first = int(first_token_read(spec, np.array([start]))[0]) // spec.block_size
    return list(range(first, last + 1))


def written_entries(spec: KVCacheSpec, start: int, end: int) -> list[int]:
    """Those of them whose blocks it writes; of a recurrent state also any between that is not 0."""
    if isinstance(spec, RingSpec):
        return [0]
    last = (end - 1) // spec.block_size
    return [last] if isinstance(spec, RecurrentSpec) else list(range(start // spec.block_size, last + 1))


def check_blocks(
    groups: Sequence[KVCacheGroup], tables: Sequence[np.ndarray], starts: np.ndarray, ends: np.ndarray,
    num_blocks: int, names: np.ndarray,
) -> None:  # fmt: skip
    """tables: [R, M_g] of each group. starts, ends [R]: of each sequence's new tokens, at least one each. names [R]:
    what messages call the sequences.

    Raises RequestError: a block that a step needs is missing, or one that it writes is used in another place, too.
    """
    uses = [_uses(group.spec, table, starts, ends) for group, table in zip(groups, tables)]
    for g, (rows, entries, _) in enumerate(uses):
        if (missing := np.flatnonzero(tables[g][rows, entries] == 0)).size:
            row, entry = int(rows[missing[0]]), int(entries[missing[0]])
            start, end = int(starts[row]), int(ends[row])
            raise RequestError(
                f"sequence {names[row]}: entry {entry} of its blocks of group {g} is 0, the null block, but its step "
                f"of tokens {start} to {end - 1} needs entries {needed_entries(groups[g].spec, start, end)}."
            )
    counts = [len(rows) for rows, _, _ in uses]
    group = np.repeat(np.arange(len(groups)), counts)
    rows, _, is_written = (np.concatenate(part) for part in zip(*uses))
    blocks = np.concatenate([tables[g][rows, entries] for g, (rows, entries, _) in enumerate(uses)])
    in_place = np.repeat([isinstance(g.spec, RecurrentSpec) for g in groups], counts)
    _check_shared(group, names[rows], blocks, is_written, in_place, num_blocks)


def _check_shared(
    group: np.ndarray, rows: np.ndarray, blocks: np.ndarray, is_written: np.ndarray, in_place: np.ndarray,
    num_blocks: int,
) -> None:  # fmt: skip
    """[N] of every use of a block. in_place: one sequence may read and write it, as it may a running state."""
    uses, last_use, writer = np.arange(len(blocks)), np.full(num_blocks, -1), np.full(num_blocks, -1)
    last_use[blocks], writer[blocks[is_written]] = uses, uses[is_written]
    others = last_use[blocks]
    wrong = group[others] != group
    if not wrong.any():
        others = writer[blocks]
        alone = in_place & (rows[others] == rows) & ~is_written
        wrong = (others >= 0) & (others != uses) & ~alone
    if not wrong.any():
        return
    one = int(np.flatnonzero(wrong)[0])
    other = int(others[one])
    places = " and ".join(f"sequence {rows[i]}'s of group {group[i]}" for i in sorted((one, other)))
    raise RequestError(
        f"block {blocks[one]} stands in two places, {places}. Block ids are of one pool, which all groups share, and "
        "only a block that this step does not write may be several sequences': `copy_blocks` makes a copy."
    )


def _uses(spec: KVCacheSpec, table: np.ndarray, starts: np.ndarray, ends: np.ndarray):
    """(sequence, entry, is it written?) of every entry that a step uses, [N] each."""
    rows = np.arange(len(starts))
    if isinstance(spec, RingSpec):
        return rows, np.zeros_like(rows), np.ones(len(rows), bool)
    last = (ends - 1) // spec.block_size
    if isinstance(spec, RecurrentSpec):
        begun = starts > 0
        read = (starts[begun] - 1) // spec.block_size
        entries = np.arange(table.shape[1])
        first = starts // spec.block_size
        between = (entries >= first[:, None]) & (entries < last[:, None]) & (table != 0)
        at_row, at_entry = np.nonzero(between)
        is_written = np.repeat([False, True], [len(read), len(at_row) + len(rows)])
        return np.concatenate([rows[begun], at_row, rows]), np.concatenate([read, at_entry, last]), is_written
    first = first_token_read(spec, starts) // spec.block_size
    counts = last - first + 1
    rows = np.repeat(rows, counts)
    entries = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    return rows, entries, entries >= np.repeat(starts // spec.block_size, counts)
