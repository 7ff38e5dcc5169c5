"""The thread that owns an engine: between steps it does what the event loop asks for, and it hands outputs back.

    event loop   submit ----+     abort ----+                         one wake-up with all outputs of a step
    thread       | step | <-+ add | step | <-+ ... | step | step | ---------------------------------------->

New requests wait for a step at most, and never hold up the event loop. With nothing to do the thread sleeps.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from pagebinder.config import SamplingParams
from pagebinder.runtime.engine import Engine
from pagebinder.runtime.outputs import RequestOutput
from pagebinder.runtime.request_checks import Prompt
from pagebinder.server.feeds import Feed
from pagebinder.server.metrics import Latencies

SHUTTING_DOWN = "The server is shutting down."
logger = logging.getLogger("pagebinder.server")
Result = TypeVar("Result")


class EngineStoppedError(RuntimeError):
    """The engine does not take requests (any more), or a step of it failed; its message is for the client."""


@dataclass(frozen=True, kw_only=True)
class NewRequest:
    """A prompt and how to continue it; the fields of `Engine.add_request`."""

    prompt: Prompt | None
    params: SamplingParams
    encoder_prompt: Prompt | None = None
    priority: int = 0
    cache_salt: str | None = None

    def ids(self, base: str) -> list[str]:
        """Of the engine requests that it becomes."""
        return [base] if self.params.n == 1 else [f"{base}-{i}" for i in range(self.params.n)]


class EngineWorker:
    """Runs `engine` in a thread of its own from `start` to `stop`, after which it may start again; other methods are
    the event loop's. The first request starts it, too: nobody does that for a mounted application."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.latencies = engine, Latencies()
        self._inbox: queue.SimpleQueue[tuple[Future, Callable[[], Any]]] = queue.SimpleQueue()
        self._feeds: dict[str, Feed] = {}  # of the thread
        self._numbers = itertools.count()
        self._stopping = self._ending = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._stopping = self._ending = False
            self._thread = threading.Thread(target=self._run, name="pagebinder-engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Fail what runs, and end the thread after the step that it is in."""
        self._stopping = True
        if self._thread is not None:
            self._post(lambda: None)
            self._thread.join()

    @property
    def is_running(self) -> bool:
        """Are requests served, or would the first one be?"""
        return not self._stopping and (self._thread is None or self._thread.is_alive())

    async def call(self, function: Callable[[], Result]) -> Result:
        """What `function` returns or raises, run between two steps."""
        if not self.is_running:
            raise EngineStoppedError(SHUTTING_DOWN)
        if self._thread is None:
            self.start()
        return await asyncio.wrap_future(self._post(function))

    async def submit(self, requests: Sequence[NewRequest], *, every_step: bool) -> Feed:
        """Queue all of some requests, or none.

        Raises RequestError, CacheCapacityError, EngineStoppedError: one of them cannot be served, or all have been
            ended; nothing was queued.
        """
        if self._ending:
            raise EngineStoppedError(SHUTTING_DOWN)
        bases = [f"http-{next(self._numbers)}" for _ in requests]
        feed = Feed([i for base, r in zip(bases, requests) for i in r.ids(base)], every_step=every_step)
        try:
            await self.call(lambda: self._add(bases, requests, feed))
        except asyncio.CancelledError:  # the client went away while they were being queued
            self.abort(feed)
            raise
        return feed

    def abort(self, feed: Feed) -> None:
        """Stop what is left of a feed's requests, soon; its reader gets outputs that are finished by "abort"."""
        self._post(lambda: self._abort(list(feed.places)))

    def end_requests(self) -> None:
        """Answer all requests with an error, soon, and those that come later: the server is shutting down."""
        self._ending = True
        self._post(lambda: self._fail_all(EngineStoppedError(SHUTTING_DOWN)))

    def _post(self, function: Callable[[], Any]) -> Future:
        future: Future = Future()
        self._inbox.put((future, function))
        return future

    # In the thread

    def _run(self) -> None:
        while not self._stopping:
            self._take_messages(wait=not self.engine.has_unfinished)
            if not self._stopping and self.engine.has_unfinished:
                self._step()
        self._fail_all(EngineStoppedError(SHUTTING_DOWN))
        self._take_messages(wait=False)

    def _take_messages(self, *, wait: bool) -> None:
        while wait or not self._inbox.empty():
            future, function = self._inbox.get()
            wait = False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:  # a step that fails would fail again: its requests end, the server goes on
            logger.exception("a step of the engine failed; %d requests end", len(self._feeds))
            self._fail_all(EngineStoppedError(f"The engine failed: {error}"))
            return
        self._deliver(outputs)

    def _add(self, bases: list[str], requests: Sequence[NewRequest], feed: Feed) -> None:
        added: list[str] = []
        try:
            for base, request in zip(bases, requests):
                added += self.engine.add_request(
                    base, request.prompt, request.params, encoder_prompt=request.encoder_prompt,
                    priority=request.priority, cache_salt=request.cache_salt,
                )  # fmt: skip
        except Exception:
            for request_id in added:
                self.engine.abort(request_id)
            raise
        self._feeds |= dict.fromkeys(added, feed)
        for request_id in added:
            self.latencies.arrived(request_id)

    def _abort(self, request_ids: Sequence[str]) -> None:
        outputs = [self.engine.abort(request_id) for request_id in request_ids]
        self._deliver([output for output in outputs if output is not None])

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Feed, RequestOutput]]] = defaultdict(list)
        for output in outputs:
            self.latencies.got(output)
            feed = self._feeds.get(output.request_id)
            if feed is not None and (output.finished or feed.every_step):
                by_loop[feed.loop].append((feed, output))
            if output.finished:
                self._feeds.pop(output.request_id, None)
        for loop, news in by_loop.items():
            _call_soon(loop, lambda news=news: [feed.put(output) for feed, output in news])

    def _fail_all(self, error: Exception) -> None:
        feeds, self._feeds = self._feeds, {}
        for request_id in feeds:
            self.engine.abort(request_id)
            self.latencies.forget(request_id)
        for feed in set(feeds.values()):
            _call_soon(feed.loop, lambda feed=feed: feed.fail(error))


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    """Nobody reads any more where a loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
