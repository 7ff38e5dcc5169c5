"""Requests for continuations: bodies become engine requests, and outputs become one answer or a stream of pieces."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pagebinder.config import SamplingParams
from pagebinder.errors import RequestError
from pagebinder.guides import JsonSchema
from pagebinder.runtime.encoder_prompts import decoder_prompt_ids, pair_prompts
from pagebinder.runtime.outputs import RequestOutput
from pagebinder.runtime.prompt_rows import PromptRowsTakenError
from pagebinder.runtime.request_checks import has_embeds
from pagebinder.server.answers import Answer, ChatAnswer, CompletionAnswer, Progress
from pagebinder.server.chat import ChatTemplate, holds_images
from pagebinder.server.engine_worker import EngineStoppedError, EngineWorker, NewRequest
from pagebinder.server.feeds import Feed
from pagebinder.server.prompt_limits import PromptLimit
from pagebinder.server.protocol import (
    MOST_PROMPTS,
    MOST_SAMPLES_OF_ALL,
    ChatBody,
    CompletionBody,
    Function,
    Sampling,
)
from pagebinder.server.tool_answers import ToolAnswer, added_marks
from pagebinder.server.tool_call_kinds import NO_PARAMETERS, Tool
from pagebinder.server.tool_guides import guide_of_choice

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
ROWS_ASKED_EVERY = 0.05  # seconds
Result = TypeVar("Result")


class Completions:
    """Serves /v1/completions and /v1/chat/completions with one engine, under the name `model`. `sampling`: what
    requests are sampled with where they do not say."""

    def __init__(
        self, worker: EngineWorker, model: str, chat_template: ChatTemplate, sampling: Mapping[str, Any]
    ) -> None:
        self.worker, self.model, self.chat_template, self.sampling = worker, model, chat_template, sampling
        engine = worker.engine
        self.tokenizer = engine.model.tokenizer
        room = engine.model.max_model_len - 1  # beside a new token
        self._prompts = PromptLimit(self.tokenizer, "prompt", room)
        self._encoder_prompts = PromptLimit(self.tokenizer, "encoder prompt", engine.kv.max_encoder_tokens)
        self._conversations = PromptLimit(self.tokenizer, "conversation", room)
        # Of one thread: a tokenizer must not be changed by one while another uses it.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="pagebinder-tokenizer")
        # What an image takes, seconds at times, others do not wait for; two at once would gain nothing.
        self._seeing = ThreadPoolExecutor(1, thread_name_prefix="pagebinder-images")
        self._waits_for_rows = asyncio.Lock()

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.sampling_params(max_tokens=max_tokens, logprobs=body.logprobs, defaults=self.sampling)
        new = await self._run(self._tokenizing, lambda: self._new_requests(body, params))
        return await self._answer(new, CompletionAnswer(self.model, self.tokenizer, body), body, request)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        if self.worker.engine.model.encoder is not None:
            raise RequestError("The model is an encoder-decoder: use /v1/completions with encoder_prompt.")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if body.top_logprobs is not None and logprobs is None:
            raise RequestError("top_logprobs needs logprobs=true.")
        limits = {body.max_tokens, body.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError("max_tokens and max_completion_tokens differ: give one of them.")
        max_tokens = limits.pop() if limits else None
        params = body.sampling_params(max_tokens=max_tokens, logprobs=logprobs, defaults=self.sampling)
        images = holds_images(body.messages)
        threads = self._seeing if images else self._tokenizing
        new, answer = await self._run(threads, lambda: self._conversation(body, params))
        return await self._answer([new], answer, body, request)

    async def _run(self, threads: ThreadPoolExecutor, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(threads, function)

    def _conversation(self, body: ChatBody, params: SamplingParams) -> tuple[NewRequest, ChatAnswer]:
        if shown := body.shown_tools():
            form = self.chat_template.call_format()
            tools = [Tool(tool.name, tool.parameters or NO_PARAMETERS) for tool in shown]
            marks = added_marks(self.tokenizer, form)
            params = dataclasses.replace(
                params, guide=guide_of_choice(form, tools, body, params.guide, marks)
            )
            answer = ToolAnswer(self.model, self.tokenizer, body, form, tools)
        else:
            answer = ChatAnswer(self.model, self.tokenizer, body)
        try:
            self._prepare(params)
        except RequestError:
            self._check_tools(shown)
            raise
        described = [tool.model_dump(exclude_none=True, exclude={"strict"}) for tool in shown]
        prompt = self.chat_template.prompt(
            body.messages, body.chat_template_kwargs, self._conversations,
            [{"type": "function", "function": tool} for tool in described],
        )  # fmt: skip
        new = NewRequest(prompt=prompt, params=params, priority=body.priority, cache_salt=body.cache_salt)
        return new, answer

    def _check_tools(self, tools: Sequence[Function]) -> None:
        """Raises RequestError: the schema of a tool is wrong, which is named."""
        for number, tool in enumerate(tools):
            try:
                self.worker.engine.guides.compiled(JsonSchema(tool.parameters))
            except RequestError as error:
                raise RequestError(
                    f"tools[{number}].function.parameters, of {tool.name!r}: {error}"
                ) from error

    def _prepare(self, params: SamplingParams) -> None:
        """Compile a guide here, where no step waits for it."""
        if params.guide is not None:
            self.worker.engine.guides.compiled(params.guide)

    def _new_requests(self, body: CompletionBody, params: SamplingParams) -> list[NewRequest]:
        """Of several prompts and a seed, prompt i draws from seed + i n: equal noise would make them alike."""
        if body.prompt is None and body.encoder_prompt is None:
            raise RequestError("Give a prompt.")
        pairs = pair_prompts(body.prompt, body.encoder_prompt)
        if not 1 <= len(pairs) <= MOST_PROMPTS:
            raise RequestError(f"{len(pairs)} prompts: give 1 to {MOST_PROMPTS}.")
        self._prepare(params)
        if len(pairs) * params.n > MOST_SAMPLES_OF_ALL:
            raise RequestError(
                f"{len(pairs)} prompts with n={params.n}: give {MOST_SAMPLES_OF_ALL} samples at most."
            )
        requests = []
        for index, (prompt, encoder_prompt) in enumerate(pairs):
            try:
                self._prompts.check(prompt)
                self._encoder_prompts.check(encoder_prompt)
                ids = decoder_prompt_ids(prompt, self.worker.engine.model)
            except RequestError as error:
                raise RequestError(f"prompts[{index}]: {error}" if len(pairs) > 1 else str(error)) from error
            seed = None if params.seed is None else params.seed + index * params.n
            requests.append(
                NewRequest(
                    prompt=ids,
                    params=dataclasses.replace(params, seed=seed), encoder_prompt=encoder_prompt,
                    priority=body.priority, cache_salt=body.cache_salt,
                )
            )  # fmt: skip
        return requests

    async def _answer(
        self, new: Sequence[NewRequest], answer: Answer, body: Sampling, request: Request
    ) -> Response:
        feed = await self._submit(new, every_step=bool(body.stream))
        if body.stream:
            return _Stream(self._events(answer, feed), lambda: self.worker.abort(feed))
        async with self._aborted_if_left(feed, request):
            return JSONResponse(answer.whole(await feed.last_outputs()))

    async def _submit(self, new: Sequence[NewRequest], *, every_step: bool) -> Feed:
        """First come, first served, where embeddings of images wait for the place of others'."""
        async with (
            self._waits_for_rows if any(has_embeds(one.prompt) for one in new) else contextlib.nullcontext()
        ):
            while True:
                try:
                    return await self.worker.submit(new, every_step=every_step)
                except PromptRowsTakenError:
                    await asyncio.sleep(ROWS_ASKED_EVERY)

    @contextlib.asynccontextmanager
    async def _aborted_if_left(self, feed: Feed, request: Request) -> AsyncIterator[None]:
        """A client that goes away takes its requests along."""
        watch = asyncio.ensure_future(_disconnected(request))
        watch.add_done_callback(lambda task: task.cancelled() or self.worker.abort(feed))
        try:
            yield
        except asyncio.CancelledError:
            self.worker.abort(feed)
            raise
        finally:
            watch.cancel()

    async def _events(self, answer: Answer, feed: Feed) -> AsyncIterator[str]:
        """Server-sent events."""
        progress = [Progress() for _ in feed.places]
        last: dict[int, RequestOutput] = {}
        try:
            for event in answer.opening(len(progress)):
                yield _event(event)
            async for place, output in feed.outputs():
                last[place] = output
                piece = progress[place].take(output)
                if (event := answer.piece(place, piece)) is not None:
                    yield _event(event)
            for event in answer.closing([last[place] for place in range(len(progress))]):
                yield _event(event)
            yield "data: [DONE]\n\n"
        except EngineStoppedError as error:
            yield _event(error_json(str(error), "server_error"))


class _Stream(StreamingResponse):
    """Server-sent events; `ended` is called when they have all been sent, and when the client is gone, also before
    the first."""

    def __init__(self, events: AsyncIterator[str], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def error_json(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    readable = message.encode("utf-8", "replace").decode()  # it may quote halves of surrogate pairs
    return {"error": {"message": readable, "type": kind, "param": param, "code": code}}
