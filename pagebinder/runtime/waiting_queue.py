"""The line of requests that hold no blocks: new ones and preempted ones, best first.

A heap over keys (priority, arrival): a preempted request came before all that wait behind it, so its key
alone puts it back at the head. Aborted requests are dropped when they surface, which keeps an abort O(1).
"""

from __future__ import annotations

import heapq

from pagebinder.runtime.request import Request

Key = tuple[int, int]


class WaitingQueue:
    """Waiting requests by key (lower first). Keys are unique: the arrival number is part of them."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Request]] = []

    def push(self, key: Key, request: Request) -> None:
        heapq.heappush(self._heap, (key, request))

    def peek(self) -> Request | None:
        """The next request in line, None if nobody waits."""
        while self._heap and self._heap[0][1].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Take the request that `peek` returned."""
        return heapq.heappop(self._heap)[1]

    def requests(self) -> list[Request]:
        """All waiting requests, best first. O(n log n): for inspection."""
        return [request for _, request in sorted(self._heap) if not request.is_finished]
