"""The ASGI application: routes, errors as OpenAI's API has them, and the API key.

GET   /v1/models  /health  /metrics             what is served, whether, and how it does
POST  /v1/completions  /v1/chat/completions     of decoders and encoder-decoders
POST  /v1/embeddings                            of encoders
"""

from __future__ import annotations

import contextlib
import hmac
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
from pagebinder.server.chat import ChatTemplate
from pagebinder.server.completions import Completions, error_json
from pagebinder.server.embeddings import Embeddings
from pagebinder.server.engine_worker import EngineStoppedError, EngineWorker
from pagebinder.server.metrics import exposition
from pagebinder.server.protocol import ChatBody, CompletionBody, EmbeddingBody


def create_app(
    compiled: Any, engine_config: EngineConfig | None = None, *, model_name: str | None = None,
    api_key: str | None = None, chat_template: str | None = None, pooling: str = "auto",
) -> FastAPI:  # fmt: skip
    """An application that serves a compiled model; any ASGI server runs it, one process each.

    Args:
        compiled: a CompiledModel, which gets an engine with `engine_config` at once, or a CompiledEncoder, which
            takes `pooling` instead (see `CompiledEncoder.embed`).
        model_name: what clients call it; None: the name of its directory. api_key: clients of /v1 must bring it as a
            bearer token. chat_template: Jinja text to use in place of the checkpoint's.
    Raises:
        ConfigError: options that do not fit; and as `compiled.engine`.
    """
    name = model_name or Path(compiled.source.name).name
    if hasattr(compiled, "embed"):
        if engine_config is not None or chat_template is not None:
            raise ConfigError(f"{name} is an encoder: it has no engine and no chat template.")
        app = FastAPI(title="Pagebinder")
        _add_embeddings(app, Embeddings(compiled, name, compiled.pooling(pooling)))
    else:
        worker = EngineWorker(compiled.engine(engine_config))
        app = FastAPI(title="Pagebinder", lifespan=_running(worker))
        template = ChatTemplate(worker.engine.model.tokenizer, chat_template)
        _add_completions(app, worker, Completions(worker, name, template))
    _add_models(app, name)
    _handle_errors(app)
    if api_key is not None:
        _require_key(app, api_key)
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

    @app.get("/health")
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

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)


def _check_model(app: FastAPI, model: str | None) -> None:
    if model not in (None, app.state.model_name):
        raise HTTPException(404, f"The model {model!r} is not served here; {app.state.model_name!r} is.")


def _require_key(app: FastAPI, api_key: str) -> None:
    expected = f"Bearer {api_key}".encode()

    @app.middleware("http")
    async def check(request: Request, call_next) -> Response:
        given = request.headers.get("authorization", "").encode()
        if request.url.path.startswith("/v1") and not hmac.compare_digest(given, expected):
            message = "Bring the server's API key as a bearer token (Authorization: Bearer KEY)."
            return JSONResponse(error_json(message, "authentication_error", "invalid_api_key"), 401)
        return await call_next(request)


def _handle_errors(app: FastAPI) -> None:
    """Every error is JSON of the same shape: bad requests 400, no such thing 404, our own failures 500 and 503."""

    @app.exception_handler(PagebinderError)
    async def bad_request(request: Request, error: PagebinderError) -> JSONResponse:
        return JSONResponse(error_json(str(error), "invalid_request_error"), 400)

    @app.exception_handler(RequestValidationError)
    async def bad_body(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = first["msg"].removeprefix("Value error, ")
        text = f"{where}: {message}" if where and first["type"] != "value_error" else message
        return JSONResponse(error_json(text, "invalid_request_error", param=where or None), 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = "model_not_found" if error.status_code == 404 and "served" in str(error.detail) else None
        body = error_json(str(error.detail), "invalid_request_error", code)
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(EngineStoppedError)
    async def stopped(request: Request, error: EngineStoppedError) -> JSONResponse:
        return JSONResponse(error_json(str(error), "server_error"), 503)
