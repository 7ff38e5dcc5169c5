"""What is too large to be looked at: bodies of requests, and texts that no tokenizer could make short enough.

A tokenizer takes seconds and gigabytes for a text of megabytes, only for the engine to refuse its tokens then.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagebinder.errors import RequestError
from pagebinder.runtime.request_checks import check_unicode

LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN = 4 << 20, 32


def body_limit(max_model_len: int) -> int:
    """Bytes of a request's body at most: room for many prompts, or for one of the longest."""
    return max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * max_model_len)


def text_limit(tokenizer: Any, max_model_len: int) -> int | None:
    """Characters beyond which a text has more tokens than the model takes, as none of them is longer than the
    vocabulary's longest; None without a tokenizer."""
    if tokenizer is None:
        return None
    return max_model_len * max(map(len, tokenizer.backend_tokenizer.get_vocab()), default=1)


def check_text(text: str, name: str, limit: int | None) -> None:
    """Raises RequestError: the text is too long for the model however it is tokenised, or no Unicode."""
    if limit is not None and len(text) > limit:
        raise RequestError(
            f"The {name} has {len(text):,} characters: more tokens than the model takes; shorten it."
        )
    check_unicode(text, name)


class BodyLimit:
    """ASGI middleware: a body of more than `limit` bytes is answered with 413, whether its length was said or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            # Before it is asked for: a client that expects "100 Continue" is not told to go on.
            message = await receive() if said <= self.limit else {}
            taken += len(message.get("body", b""))
            if max(taken, said) > self.limit:
                raise HTTPException(
                    413, f"The body has over {self.limit:,} bytes, more than this model could take."
                )
            return message

        length = dict(scope.get("headers", ())).get(b"content-length", b"")
        said = int(length) if length.isdigit() else 0
        await self.app(scope, counted if scope["type"] == "http" else receive, send)
