"""The running requests as arrays, one entry per row of the KV cache's dense rows.

    row       request   known   computed   planned   covered   cache_at   limit
     0        "a"          42      41         42        48        48        80     decodes; its token is in flight
     1        "d"           5       4          4         8         8        12     decodes
     2        "c"        1200     512       1024      1024       ...      1400     its prompt is computed in chunks

A step asks of all requests at once: what is there to compute (known - planned), who needs blocks (beyond covered),
who has blocks to store (computed >= cache_at), who is done (known >= limit). Only those rows are then looked at one
by one, so a step in which everybody decodes costs a few array operations, whatever the contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pagebinder.runtime.kv.rows import RequestRows
from pagebinder.runtime.request import Request


class Columns(NamedTuple):
    """The running requests, row by row; arrays are [R] int64, views into what the batch keeps.

    by_row: the requests. token_lists: their `all_token_ids`. known: tokens of the request. computed: tokens whose
    step's results are in. planned: computed and in flight. covered: tokens the request's blocks can take. cache_at:
    computed tokens at which a block can be stored for reuse. limit: tokens at which the request ends. last_token: its
    newest token. flags: `Request.flags`. whole_until: `Request.whole_until`.
    """

    by_row: list[Request]
    token_lists: list[list[int]]
    known: np.ndarray
    computed: np.ndarray
    planned: np.ndarray
    covered: np.ndarray
    cache_at: np.ndarray
    limit: np.ndarray
    last_token: np.ndarray
    flags: np.ndarray
    whole_until: np.ndarray


class RunningBatch:
    """Progress of the requests that hold blocks, see `Columns`. Rows come and go with `rows`, which the KV cache
    manages.

    `encoder_lens`: array of the rows' encoder tokens, int32 as a step's graph takes them.
    """

    def __init__(self, rows: RequestRows, requests: Mapping[str, Request]) -> None:
        self.rows = rows
        self._requests = requests
        self._arrays = [rows.add_array(np.int64) for _ in range(9)]
        (
            self._known, self._computed, self._planned, self._covered, self._cache_at, self._limit,
            self._last_token, self._flags, self._whole_until,
        ) = self._arrays  # fmt: skip
        self.encoder_lens = rows.add_array(np.int32)
        # Rows that were given away since the start: while it stands still, a row keeps its request.
        self.moves = 0
        self._seen = (-1, 0)
        self._columns: Columns | None = None
        self._order: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    # Whole columns, first row to last

    def now(self) -> Columns:
        """All columns at once: views that hold until a row is assigned or given away."""
        rows = self.rows.ids
        # Rows are only added at the end or given away, so these two numbers tell every change.
        if self._columns is None or self._seen != (self.moves, len(rows)):
            self._seen = (self.moves, len(rows))
            self._order = None
            by_row = [self._requests[i] for i in rows]
            arrays = [array.data[: len(rows)] for array in self._arrays]
            self._columns = Columns(by_row, [request.all_token_ids for request in by_row], *arrays)
        return self._columns

    @property
    def known(self) -> np.ndarray:
        return self.now().known

    @property
    def computed(self) -> np.ndarray:
        return self.now().computed

    @property
    def planned(self) -> np.ndarray:
        return self.now().planned

    @property
    def covered(self) -> np.ndarray:
        return self.now().covered

    @property
    def cache_at(self) -> np.ndarray:
        return self.now().cache_at

    @property
    def last_token(self) -> np.ndarray:
        return self.now().last_token

    @property
    def by_row(self) -> list[Request]:
        """The requests, row by row. Not changed afterwards, so a step may keep it."""
        return self.now().by_row

    def order(self, key: Callable[[Request], tuple]) -> np.ndarray:
        """Rows from the smallest key to the largest."""
        by_row = self.now().by_row
        if self._order is None:
            keys = [key(request) for request in by_row]
            self._order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
        return self._order

    def row(self, request: Request) -> int:
        return self.rows.row_of[request.request_id]

    def wanted(self, ahead_flags: int = 0) -> np.ndarray:
        """Tokens of every row [R] that can be scheduled now: the known ones, and one that a step in flight is
        choosing for a request with one of these flags, unless that token ends it."""
        now = self.now()
        want = now.known - now.planned
        if ahead_flags:
            in_flight = (want == 0) & (now.planned > now.computed)
            want[in_flight & ((now.flags & ahead_flags) != 0) & (now.known + 1 < now.limit)] = 1
        return want

    def has_whole_ranges(self) -> bool:
        """Has some row tokens to come that one step computes as a whole (`Request.whole_ranges`)?"""
        now = self.now()
        return bool((now.planned < now.whole_until).any())

    # Changes of one row

    def start(self, request: Request, computed: int, covered: int, cache_at: int, limit: int) -> None:
        """Fill in the row that the KV cache has just given to a request; for the numbers see `Columns`."""
        row = self.row(request)
        self._known.data[row] = request.num_tokens
        self._computed.data[row] = self._planned.data[row] = computed
        self._covered.data[row] = covered
        self._cache_at.data[row] = cache_at
        self._limit.data[row] = limit
        self._last_token.data[row] = request.all_token_ids[-1]
        self._flags.data[row] = request.flags
        self._whole_until.data[row] = request.whole_until
        self.encoder_lens.data[row] = request.num_encoder_tokens

    def stop(self, request: Request, release: Callable[[Request], object]) -> object:
        """Write the progress back into the request and call `release`, which gives away its row."""
        self.sync(request)
        self.moves += 1
        return release(request)

    def sync(self, request: Request, row: int | None = None) -> int:
        """Write the computed tokens into the request; returns its row."""
        row = self.row(request) if row is None else row
        request.num_computed_tokens = int(self._computed.data[row])
        return row
