"""The API key as ASGI middleware."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pagebinder.errors import ConfigError
from pagebinder.server.completions import error_json


class ApiKey:
    """Paths under /v1 are for clients that bring the key as a bearer token.

    Raises ConfigError: a key that no client could bring.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self._key = app, check_key(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _route(scope).startswith("/v1") and not self._is_right(scope):
            message = "Bring the server's API key as a bearer token (Authorization: Bearer KEY)."
            refusal = JSONResponse(error_json(message, "authentication_error", "invalid_api_key"), 401)
            await refusal(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_right(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._key)


def _route(scope: Scope) -> str:
    """The path as routes have it: without that under which the application is mounted."""
    path, root = scope["path"], scope.get("root_path", "")
    return path.removeprefix(root) if root and f"{path}/".startswith(f"{root}/") else path


def check_key(key: str) -> bytes:
    """The key as it is compared. Raises ConfigError."""
    if not (key.strip() and key.isascii()):
        raise ConfigError("The API key must be ASCII characters, not none: clients could not bring it.")
    return key.strip().encode()
