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
from pagebinder.runtime.kv.specs import KVCacheSpec, RecurrentSpec, RingSpec


def needed_entries(spec: KVCacheSpec, start: int, end: int) -> list[int]:
    """Entries of a sequence's block table that a step which computes its tokens [start, end) reads or writes. All
    others may be 0: of a window those behind it, of a recurrent state all but the one it reads and the one it writes.
    """
    _, entries, _ = uses(spec, np.zeros((1, 0), np.int64), np.array([start]), np.array([end]))
    return sorted(set(entries.tolist()))


def check_blocks(
    groups: Sequence[KVCacheGroup], tables: Sequence[np.ndarray], starts: np.ndarray, ends: np.ndarray,
    num_blocks: int, names: np.ndarray,
) -> None:  # fmt: skip
    """tables: [R, M_g] of each group. starts, ends [R]: of each sequence's new tokens, at least one each. names [R]:
    what messages call the sequences.

    Raises RequestError: a block that a step needs is missing, or one that it writes is used in another place, too.
    """
    is_written = np.zeros(num_blocks, bool)
    used = []
    for g, (group, table) in enumerate(zip(groups, tables)):
        rows, entries, writes = uses(group.spec, table, starts, ends)
        blocks = table[rows, entries]
        if not blocks.all():
            at = int(np.flatnonzero(blocks == 0)[0])
            start, end = int(starts[rows[at]]), int(ends[rows[at]])
            raise RequestError(
                f"sequence {names[rows[at]]}: entry {entries[at]} of its blocks of group {g} is 0, the null block, "
                f"but its step of tokens {start} to {end - 1} needs entries {needed_entries(group.spec, start, end)}."
            )
        is_written[blocks[writes]] = True
        used.append((blocks, rows, writes))
    # Of blocks that are written, every use: few, beside those that are read alone.
    few = [np.flatnonzero(is_written[blocks]) for blocks, _, _ in used]
    group = np.repeat(np.arange(len(groups)), [len(places) for places in few])
    in_place = np.array([isinstance(group.spec, RecurrentSpec) for group in groups])[group]
    blocks, rows, writes = (
        np.concatenate([one[places] for one, places in zip(part, few)]) for part in zip(*used)
    )
    _check_shared(group, names[rows], blocks, writes, in_place)


def _check_shared(
    group: np.ndarray, rows: np.ndarray, blocks: np.ndarray, is_written: np.ndarray, in_place: np.ndarray
) -> None:
    """[N] of every use of blocks that are written. in_place: a sequence may read and write one, as it may a running
    state."""
    order = np.lexsort((~is_written, blocks))
    first = order[np.searchsorted(blocks[order], blocks)]  # the one that writes the same block
    alone = in_place & (group[first] == group) & (rows[first] == rows) & ~is_written
    wrong = np.flatnonzero((first != np.arange(len(blocks))) & ~alone)
    if not wrong.size:
        return
    one, other = sorted((int(wrong[0]), int(first[wrong[0]])))
    raise RequestError(
        f"block {blocks[one]} stands in two places, sequence {rows[one]}'s of group {group[one]} and sequence "
        f"{rows[other]}'s of group {group[other]}. Block ids are of one pool, which all groups share, and only a "
        "block that this step does not write may be several sequences': `copy_blocks` makes a copy."
    )


def uses(spec: KVCacheSpec, table: np.ndarray, starts: np.ndarray, ends: np.ndarray):
    """(sequence, entry, is it written?) of every entry that a step uses, [N] each. table: [R, M], which says where
    snapshots of recurrent states are wanted."""
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
    skipped = np.array([spec.num_skipped_tokens(start) for start in starts.tolist()])
    first = skipped // spec.block_size
    counts = last - first + 1
    rows = np.repeat(rows, counts)
    entries = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    return rows, entries, entries >= np.repeat(starts // spec.block_size, counts)
