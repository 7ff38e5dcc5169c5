"""uvicorn, but for its end: requests go on for a while, then are told why they end, instead of being cancelled.

SIGINT or SIGTERM   no new connections | running requests go on, for `seconds` at most | they get an error | stop
once more           they get the error at once          a third time     uvicorn's own way out
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

SECONDS_TO_SAY_SO = 10  # for a step to end and errors to be sent, before uvicorn cancels what is left


class PatientServer(uvicorn.Server):
    """Serves `app` (of `create_app`) until a signal comes; then `run` returns. `on_ready` is called when requests are
    taken and signals end them as above."""

    def __init__(self, app: FastAPI, seconds: int, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=seconds + SECONDS_TO_SAY_SO
        )
        super().__init__(config)
        self._end_requests, self._seconds, self._on_ready = app.state.end_requests, seconds, on_ready
        self._num_signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self.should_exit = True
        elif self._num_signals == 2:
            self._end_requests()
        else:
            self.force_exit = True
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # which traces what it cancels

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets=None) -> None:
        timer = asyncio.get_running_loop().call_later(self._seconds, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
