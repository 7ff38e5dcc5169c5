"""From the engine's thread to the event loop: what the samples of one HTTP request have become so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from pagebinder.runtime.outputs import RequestOutput


class Feed:
    """Outputs of some engine requests, read by one task. A slow reader finds the latest output of each, not all.

    Made in a task of the event loop; `put` and `fail` are called there, too. `every_step`: wants an output of each
    step, not the last one alone.
    """

    def __init__(self, request_ids: Sequence[str], *, every_step: bool) -> None:
        self.places = {request_id: place for place, request_id in enumerate(request_ids)}
        self.every_step = every_step
        self.loop = asyncio.get_running_loop()
        self._latest: dict[int, RequestOutput] = {}
        self._news = asyncio.Event()
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        self._latest[self.places[output.request_id]] = output
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yields (place of the request, its output so far) until all have finished. Raises what `fail` was told."""
        unfinished = len(self.places)
        while unfinished:
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            latest, self._latest = self._latest, {}
            for place, output in latest.items():
                unfinished -= output.finished
                yield place, output

    async def last_outputs(self) -> list[RequestOutput]:
        """What each request ended as, in their order."""
        last = {place: output async for place, output in self.outputs()}
        return [last[place] for place in range(len(self.places))]
