"""Dense rows for the requests that hold blocks, and arrays that keep a request's data in its row.

    row   request     block_table_0 [S, M]        num_computed [S]
     0    "a"         7  3  9  0  0                   41
     1    "d"         1  0  0  0  0                    5            release("a"): the last row moves to 0,
     2    "c"         4  8  0  0  0                   19            in every array
     3    free

Rows 0 .. len - 1 are always in use, so a step's batch is a prefix of every array: no gathering, and the block
tables reach the graph without being copied. Per step only changed entries are written; the cost of a row's width
is paid when a request ends, never while it runs.
"""

from __future__ import annotations

import numpy as np

INITIAL_ROWS = 8


class RowArray:
    """One array with a row per request: `data` [S] or [S, width]. `data` is replaced when the rows outgrow it."""

    __slots__ = ("data", "fill")

    def __init__(self, num_rows: int, width: int | None, dtype, fill: int) -> None:
        shape = (num_rows,) if width is None else (num_rows, width)
        self.fill = fill
        # zeros are not touched before they are written, so wide tables cost memory only as far as they are used
        self.data = np.full(shape, fill, dtype) if fill else np.zeros(shape, dtype)


class RequestRows:
    """Which row a request has. `ids[row]` is its id; `row_of[id]` its row."""

    def __init__(self, num_rows: int = INITIAL_ROWS) -> None:
        self.ids: list[str] = []
        self.row_of: dict[str, int] = {}
        self._capacity = max(1, num_rows)
        self._arrays: list[RowArray] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.row_of

    def add_array(self, dtype, width: int | None = None, fill: int = 0) -> RowArray:
        """A new array whose rows follow the requests; a row that is assigned anew starts as `fill`."""
        array = RowArray(self._capacity, width, dtype, fill)
        self._arrays.append(array)
        return array

    def assign(self, request_id: str) -> int:
        """Give a request the next row. O(1), but for doubling the arrays."""
        assert request_id not in self.row_of, f"{request_id!r} has a row already"
        row = len(self.ids)
        if row == self._capacity:
            self._grow()
        self.ids.append(request_id)
        self.row_of[request_id] = row
        return row

    def release(self, request_id: str) -> tuple[int, int]:
        """Take a request's row away; the last row moves there. Returns (row moved from, row moved to)."""
        row, last = self.row_of.pop(request_id), len(self.ids) - 1
        moved = self.ids.pop()
        if row != last:
            self.ids[row] = moved
            self.row_of[moved] = row
        for array in self._arrays:
            if row != last:
                array.data[row] = array.data[last]
            array.data[last] = array.fill
        return last, row

    def _grow(self) -> None:
        old, self._capacity = self._capacity, 2 * self._capacity
        for array in self._arrays:
            data = np.full((self._capacity, *array.data.shape[1:]), array.fill, array.data.dtype)
            data[:old] = array.data
            array.data = data
