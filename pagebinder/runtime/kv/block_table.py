"""A request's blocks in one group, mirrored into its row of the group's array that the graph reads.

blocks     [ null ][ null ][ #9 ][ #12 ]        first_live = 2
row        [  0   ][  0   ][ 9  ][ 12  ][ 0 ][ 0 ] ...
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagebinder.runtime.kv.blocks import KVCacheBlock
from pagebinder.runtime.kv.rows import RequestRows, RowArray


class BlockTable:
    """Append-only apart from entries that are replaced in place: by null, or by a copy of their block.

    Blocks before `first_live` are null; blocks before `num_hashed` were offered to the prefix cache.
    `copy_from`: the partly hit block whose copy becomes the next one appended. `begins_inside`: the block that lacks
    its first tokens, because the request started inside it and does not see them (-1: none); it is never cached.
    """

    __slots__ = (
        "_array",
        "_rows",
        "begins_inside",
        "blocks",
        "copy_from",
        "covered_tokens",
        "first_live",
        "num_hashed",
        "planned_tokens",
        "request_id",
    )

    def __init__(self, request_id: str, rows: RequestRows, array: RowArray) -> None:
        self.request_id = request_id
        self._rows, self._array = rows, array
        self.blocks: list[KVCacheBlock] = []
        self.first_live = 0
        self.num_hashed = 0
        self.begins_inside = -1
        self.copy_from: KVCacheBlock | None = None
        # Kept by managers whose tables may have nulls ahead; others derive it from the table's length.
        self.covered_tokens = 0
        # Tokens that are computed, or will be by steps in flight: for managers that replace blocks ahead.
        self.planned_tokens = 0

    @property
    def row(self) -> np.ndarray:
        return self._array.data[self._rows.row_of[self.request_id]]

    @property
    def ids(self) -> np.ndarray:
        """Block ids so far (0 = null), int32: a view of the row. It is void once the request is freed."""
        return self.row[: len(self.blocks)]

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        start = len(self.blocks)
        self.blocks.extend(blocks)
        self.row[start : len(self.blocks)] = [block.block_id for block in blocks]

    def append(self, block: KVCacheBlock, row: int) -> None:
        """Like `extend` with one block, for who knows the request's row."""
        self._array.data[row, len(self.blocks)] = block.block_id
        self.blocks.append(block)

    def put(self, index: int, block: KVCacheBlock) -> None:
        self.blocks[index] = block
        self.row[index] = block.block_id

    def drop_before(self, end: int, null: KVCacheBlock) -> list[KVCacheBlock]:
        """Turn the live blocks before `end` into nulls; returns them in order."""
        start = self.first_live
        behind = self.blocks[start:end]
        self.blocks[start:end] = [null] * len(behind)
        self.row[start:end] = 0
        self.first_live = end
        return behind

    def cut(self, length: int) -> None:
        """Forget the (null) entries from `length` on."""
        self.row[length : len(self.blocks)] = 0
        del self.blocks[length:]

    @property
    def live_blocks(self) -> list[KVCacheBlock]:
        return self.blocks[self.first_live :]
