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

import numpy as np

from pagebinder.runtime.kv.rows import RequestRows
from pagebinder.runtime.request import Request


class RunningBatch:
    """Progress of the requests that hold blocks. Rows come and go with `rows`, which the KV cache manages.

    known: tokens of the request. computed: tokens whose step's results are in. planned: computed and in flight.
    covered: tokens the request's blocks can take. cache_at: computed tokens at which a block can be stored for
    reuse. limit: tokens at which the request ends. last_token: its newest token. flags: `Request.flags`.
    `encoder_lens`: array of the rows' encoder tokens, int32 as a step's graph takes them.
    """

    def __init__(self, rows: RequestRows, requests: Mapping[str, Request]) -> None:
        self.rows = rows
        self._requests = requests
        self._known = rows.add_array(np.int64)
        self._computed = rows.add_array(np.int64)
        self._planned = rows.add_array(np.int64)
        self._covered = rows.add_array(np.int64)
        self._cache_at = rows.add_array(np.int64)
        self._limit = rows.add_array(np.int64)
        self._last_token = rows.add_array(np.int64)
        self._flags = rows.add_array(np.int64)
        self.encoder_lens = rows.add_array(np.int32)
        # Rows that were given away since the start: while it stands still, a row keeps its request.
        self.moves = 0
        self._seen = (-1, 0)
        self._by_row: list[Request] = []
        self._token_lists: list[list[int]] = []
        self._order: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    # Whole columns, first row to last; views that hold until a row is assigned

    @property
    def known(self) -> np.ndarray:
        return self._known.data[: len(self.rows)]

    @property
    def computed(self) -> np.ndarray:
        return self._computed.data[: len(self.rows)]

    @property
    def planned(self) -> np.ndarray:
        return self._planned.data[: len(self.rows)]

    @property
    def covered(self) -> np.ndarray:
        return self._covered.data[: len(self.rows)]

    @property
    def cache_at(self) -> np.ndarray:
        return self._cache_at.data[: len(self.rows)]

    @property
    def limit(self) -> np.ndarray:
        return self._limit.data[: len(self.rows)]

    @property
    def last_token(self) -> np.ndarray:
        return self._last_token.data[: len(self.rows)]

    @property
    def flags(self) -> np.ndarray:
        return self._flags.data[: len(self.rows)]

    # Requests by row

    @property
    def by_row(self) -> list[Request]:
        """The requests, row by row. Not changed afterwards, so a step may keep it."""
        self._refresh()
        return self._by_row

    @property
    def token_lists(self) -> list[list[int]]:
        """`all_token_ids` of every row."""
        self._refresh()
        return self._token_lists

    def order(self, key: Callable[[Request], tuple]) -> np.ndarray:
        """Rows from the smallest key to the largest."""
        self._refresh()
        if self._order is None:
            keys = [key(request) for request in self._by_row]
            self._order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
        return self._order

    def row(self, request: Request) -> int:
        return self.rows.row_of[request.request_id]

    # Changes of one row

    def start(self, request: Request, num_computed_tokens: int, limit: int) -> int:
        """Fill in the row that the KV cache has just given to a request. Returns the row."""
        row = self.row(request)
        self._known.data[row] = request.num_tokens
        self._computed.data[row] = self._planned.data[row] = num_computed_tokens
        self._limit.data[row] = limit
        self._last_token.data[row] = request.all_token_ids[-1]
        self._flags.data[row] = request.flags
        self.encoder_lens.data[row] = request.num_encoder_tokens
        request.num_computed_tokens = num_computed_tokens
        return row

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

    def _refresh(self) -> None:
        # Rows are only added at the end or given away, so these two numbers tell every change.
        if self._seen != (self.moves, len(self.rows)):
            self._seen = (self.moves, len(self.rows))
            self._by_row = [self._requests[i] for i in self.rows.ids]
            self._token_lists = [request.all_token_ids for request in self._by_row]
            self._order = None
