"""Where the bytes of a plan go that no token uses, per group and by cause, for any groups and any workload.

block of a group   [ page ][ page ]|  empty slot  |.... padding ....|
                   raw + alignment   a larger group   what another kind
                                     of the kind has  of layer needs

padding       the block is as large as another kind's group needs
empty slots   the block is as large as a larger group of the same kind needs
alignment     pages are rounded up to units of alignment
rounding      the last block of a request is not full (K and V of context or encoder)
windows       a window or chunk is held in whole blocks
checkpoints   a recurrent layer holds a state to read beside the one it writes
prefix        tokens of a common prefix behind the last resume point: stored, or computed, again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pagebinder.runtime.kv.means import mean_blocks, mean_recomputed, mean_shared_tokens, mean_used
from pagebinder.runtime.kv.specs import KVCacheGroup, RecurrentSpec
from pagebinder.runtime.kv.workload import Workload

CAUSES = ("padding", "empty slots", "alignment", "rounding", "windows", "checkpoints", "prefix")


@dataclass(frozen=True)
class BlockSplit:
    """Bytes of a block of one group: of its layers, and what no layer uses, by cause."""

    raw: int
    alignment: int
    empty_slots: int
    padding: int


@dataclass(frozen=True)
class GroupWaste:
    """Mean bytes per request of one group: in use (common prefixes shared), and wasted by cause."""

    used_bytes: float
    by_cause: dict[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.by_cause.values())

    @property
    def percent(self) -> float:
        """Share of what the group takes."""
        taken = self.used_bytes + self.bytes
        return 100 * self.bytes / taken if taken else 0.0


def split_blocks(
    groups: Sequence[KVCacheGroup], taken_bytes: Sequence[int], bytes_per_block: int
) -> list[BlockSplit]:
    """How each group fills a block. `taken_bytes`: of a block by each group, alignment included."""
    largest: dict[tuple, int] = {}
    for group, taken in zip(groups, taken_bytes, strict=True):
        largest[group.spec.table_key] = max(largest.get(group.spec.table_key, 0), taken)
    return [
        BlockSplit(
            raw=group.page_bytes,
            alignment=taken - group.page_bytes,
            empty_slots=largest[group.spec.table_key] - taken,
            padding=bytes_per_block - largest[group.spec.table_key],
        )
        for group, taken in zip(groups, taken_bytes, strict=True)
    ]


def workload_waste(
    groups: Sequence[KVCacheGroup], splits: Sequence[BlockSplit], load: Workload, granularity: int | None
) -> tuple[GroupWaste, ...]:
    """Mean waste per request of each group; `granularity`: tokens that prefix hits are multiples of."""
    return tuple(
        _group_waste(group, split, load, granularity) for group, split in zip(groups, splits, strict=True)
    )


def _group_waste(
    group: KVCacheGroup, split: BlockSplit, load: Workload, granularity: int | None
) -> GroupWaste:
    spec, counted = group.spec, Counter(group.layer_specs)
    all_blocks = mean_blocks(spec, load)
    used = sum(n * mean_used(s, load) for s, n in counted.items())
    shared = mean_shared_tokens(load, granularity, group.block_size) if spec.grows else 0.0
    blocks = all_blocks - shared / group.block_size
    if spec.grows:
        missed = mean_shared_tokens(load, None if granularity is None else 1) - shared
        per_token = sum(n * s.entry_bytes / s.tokens_per_entry for s, n in counted.items())
        prefix, ideal = missed * per_token, used - (missed + shared) * per_token
    else:
        prefix, ideal = sum(n * mean_recomputed(s, load, granularity) for s, n in counted.items()), used
    by_cause = dict.fromkeys(CAUSES, 0.0)
    by_cause |= {
        "padding": blocks * split.padding,
        "empty slots": blocks * split.empty_slots,
        "alignment": blocks * split.alignment,
        "prefix": prefix,
        _cause_of_whole_blocks(spec): all_blocks * split.raw - used,
    }
    # Differences of large sums: what is left of them below a millionth of a byte is noise.
    return GroupWaste(ideal, {cause: round(size, 6) + 0.0 for cause, size in by_cause.items()})


def _cause_of_whole_blocks(spec) -> str:
    if isinstance(spec, RecurrentSpec):
        return "checkpoints"
    return "windows" if hasattr(spec, "window") or hasattr(spec, "chunk") else "rounding"
