"""The ASGI application: routes, errors as OpenAI's API has them, and the API key.

GET   /v1/models  /health                       what is served, and whether
      /metrics                                  how the engine does, of decoders and encoder-decoders
POST  /v1/completions  /v1/chat/completions     of decoders and encoder-decoders
POST  /v1/embeddings                            of encoders
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pagebinder.config import EngineConfig
from pagebinder.errors import ConfigError, PagebinderError
from pagebinder.server.api_key import ApiKey, check_key
from pagebinder.server.chat import ChatTemplate, stored_template
from pagebinder.server.completions import Completions, error_json
from pagebinder.server.embeddings import Embeddings
from pagebinder.server.engine_worker import EngineStoppedError, EngineWorker
from pagebinder.server.media import IMAGES_BODY_BYTES, MediaPrompts
from pagebinder.server.metrics import exposition
from pagebinder.server.prompt_limits import BodyLimit, body_limit
from pagebinder.server.protocol import ChatBody, CompletionBody, EmbeddingBody

TOOL_CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'
SEVERAL = ("prompt", "encoder_prompt", "input")  # fields that take a text or token ids, or some of either


def create_app(
    compiled: Any, engine_config: EngineConfig | None = None, *, model_name: str | None = None,
    api_key: str | None = None, chat_template: str | None = None, pooling: str = "auto",
    sampling_defaults: bool = True,
) -> FastAPI:  # fmt: skip
    """An application that serves a compiled model; any ASGI server runs it, one process each.

    Args:
        compiled: a CompiledModel, which gets an engine with `engine_config` at once, or a CompiledEncoder, which
            takes `pooling` instead (see `CompiledEncoder.embed`).
        model_name: what clients call it; None: the name of its directory. api_key: clients of /v1 must bring it as a
            bearer token. chat_template: Jinja text to use in place of the checkpoint's. sampling_defaults: what a
            request does not say of sampling is what generation_config.json says; False: what the API does.
    Raises:
        ConfigError: options that do not fit, a chat template that is none; and as `compiled.engine`.
    """
    if api_key is not None:
        check_key(api_key)
    name = model_name or Path(compiled.source.name).name
    if hasattr(compiled, "embed"):
        if engine_config is not None or chat_template is not None:
            raise ConfigError(
                f"{name} is an encoder: it has no engine (sizes, seeds, prefix caching) and no chat template."
            )
        app = FastAPI(title="Pagebinder")
        app.state.end_requests = lambda: None
        limit = body_limit(compiled.max_tokens)
        _add_embeddings(app, Embeddings(compiled, name, compiled.pooling(pooling)))
    else:
        if pooling != "auto":
            raise ConfigError(f"{name} is no encoder: leave the pooling out.")
        worker = EngineWorker(compiled.engine(engine_config))
        app = FastAPI(title="Pagebinder", lifespan=_running(worker))
        app.state.end_requests = worker.end_requests
        limit = body_limit(max(compiled.max_model_len, worker.engine.kv.max_encoder_tokens))
        media = MediaPrompts(compiled, chat_template)
        limit = limit if media.problem else max(limit, IMAGES_BODY_BYTES)
        template = ChatTemplate(
            worker.engine.model.tokenizer, chat_template, media, stored_template(compiled.source.path),
            worker.engine.model.eos_token_ids,
        )  # fmt: skip
        app.state.sampling = sampling = compiled.source.sampling_defaults if sampling_defaults else {}
        _add_completions(app, worker, Completions(worker, name, template, sampling))
    _add_models(app, name)
    _handle_errors(app)
    app.add_middleware(BodyLimit, limit=limit)
    if api_key is not None:
        app.add_middleware(ApiKey, key=api_key)
    return app


def _running(worker: EngineWorker):
    """The worker's thread lives as long as the application serves."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            worker.stop()

    return lifespan


def _add_models(app: FastAPI, name: str) -> None:
    entry = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "pagebinder"}
    app.state.model_name = name

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        _check_model(app, model)
        return entry


def _add_completions(app: FastAPI, worker: EngineWorker, completions: Completions) -> None:
    @app.post("/v1/completions")
    async def complete(body: CompletionBody, request: Request) -> Response:
        _check_model(app, body.model)
        return await completions.complete(body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        _check_model(app, body.model)
        return await completions.chat(body, request)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return Response(status_code=200 if worker.is_running else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        stats = await worker.call(worker.engine.stats)
        return Response(
            exposition(stats, worker.latencies), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def _add_embeddings(app: FastAPI, embeddings: Embeddings) -> None:
    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingBody) -> dict[str, Any]:
        _check_model(app, body.model)
        return await embeddings.embed(body)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return Response(status_code=200)


def _check_model(app: FastAPI, model: str | None) -> None:
    if model not in (None, app.state.model_name):
        raise HTTPException(404, f"The model {model!r} is not served here; {app.state.model_name!r} is.")


def _what_is_wrong(error: dict[str, Any]) -> tuple[str, str | None]:
    """(what a client should read, the field it is about) of an error of pydantic's."""
    fields = [str(part) for part in error["loc"] if part != "body"]
    is_of_body = all(field.isdigit() for field in fields)  # the place where it ends to be JSON
    if error["type"] == "json_invalid" and is_of_body:
        return f"The body is no JSON: {error.get('ctx', {}).get('error', error['msg'])}.", None
    if error["type"] == "string_unicode":  # a key, too, whose name cannot be told
        where = ".".join(fields)
        what = "a name or a text is no Unicode: it holds half of a surrogate pair."
        return f"{where or 'The body'}: {what}", where or None
    if not fields and error["type"] != "value_error":
        return 'Send a JSON object, with the header "Content-Type: application/json".', None
    if fields and fields[0] in SEVERAL:
        return f"{fields[0]}: use a text, a list of token ids, or a list of several of either.", fields[0]
    if fields and fields[0] == "tool_choice":
        return f"tool_choice: use {TOOL_CHOICES}.", "tool_choice"
    if "arguments" in fields:
        where = ".".join(fields[: fields.index("arguments") + 1])
        return f"{where}: use the text of a JSON object.", where
    message = error["msg"].removeprefix("Value error, ")
    where = ".".join(fields)
    return (f"{where}: {message}" if where and error["type"] != "value_error" else message), where or None


def _handle_errors(app: FastAPI) -> None:
    """Every error is JSON of the same shape: bad requests 400, no such thing 404, our own failures 500 and 503."""

    @app.exception_handler(PagebinderError)
    async def bad_request(request: Request, error: PagebinderError) -> JSONResponse:
        return JSONResponse(error_json(str(error), "invalid_request_error"), 400)

    @app.exception_handler(RequestValidationError)
    async def bad_body(request: Request, error: RequestValidationError) -> JSONResponse:
        text, where = _what_is_wrong(error.errors()[0])
        return JSONResponse(error_json(text, "invalid_request_error", param=where), 400)

    @app.exception_handler(Exception)
    async def failure(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_json(f"The server failed: {error}", "server_error"), 500)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = "model_not_found" if error.status_code == 404 and "served" in str(error.detail) else None
        body = error_json(str(error.detail), "invalid_request_error", code)
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(EngineStoppedError)
    async def stopped(request: Request, error: EngineStoppedError) -> JSONResponse:
        return JSONResponse(error_json(str(error), "server_error"), 503)
