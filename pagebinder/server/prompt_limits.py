"""What is too large to be looked at: bodies of requests, and prompts whose beginning has too many tokens.

A tokenizer takes seconds and gigabytes for a text of megabytes, only for the engine to refuse its tokens then.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagebinder.config_checks import check_unicode
from pagebinder.errors import RequestError
from pagebinder.runtime.request_checks import Prompt

LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN = 4 << 20, 32
MOST_DIGITS = 18  # of a length that are read: more are far beyond any limit
DROPPED_LIMITS = 16  # times the limit that are read of a body that is too large
CHARACTERS_PER_TOKEN = 16  # of the longest beginning that is looked at: most texts have 3 to 5


def body_limit(max_model_len: int) -> int:
    """Bytes of a request's body at most: room for many prompts, or for one of the longest."""
    return max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * max_model_len)


class PromptLimit:
    """Refuses prompts that are too long to be looked at; the others' tokens are counted by the engine.

    `most`: tokens that the model takes of them; 0: it takes none, which the engine says. `name`: what messages call
    one.
    """

    def __init__(self, tokenizer: Any, name: str, most: int) -> None:
        self._tokenizer, self._name, self._most = tokenizer, name, most

    def check(self, prompt: Prompt | None) -> None:
        """Raises RequestError: the prompt has more tokens than the model takes, or is no Unicode."""
        if prompt is None or self._most <= 0:
            return
        if not isinstance(prompt, str):
            if len(prompt) > self._most:
                raise RequestError(
                    f"The {self._name} has {len(prompt):,} tokens, but at most {self._most:,} are allowed."
                )
            return
        check_unicode(prompt, self._name)
        if self._tokenizer is not None and self._is_too_long(prompt):
            raise RequestError(
                f"The {self._name} has {len(prompt):,} characters: more tokens than the model takes; shorten it."
            )

    def _is_too_long(self, text: str) -> bool:
        """By its beginning: no bound on characters would do, as one token may stand for any number of them (spaces
        that a tokenizer drops, words that it does not know)."""
        beginning = text[: CHARACTERS_PER_TOKEN * self._most]
        if len(beginning) == len(text):
            return False
        # Where the text was cut, a word may have more tokens than as a whole: twice as many are enough.
        return len(self._tokenizer(beginning, add_special_tokens=False)["input_ids"]) > 2 * self._most


class BodyLimit:
    """ASGI middleware: a body of more than `limit` bytes is answered with 413, whether its length was said or not.

    Most clients read no answer before all is sent, and find a closed connection instead: some times the limit is
    taken and dropped for their sake.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit, self.most_dropped = app, limit, DROPPED_LIMITS * limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive() if said <= self.limit else {}
            taken += len(message.get("body", b""))
            if max(taken, said) <= self.limit:
                return message
            # One who expects "100 Continue" is not told to go on.
            more = (
                message.get("more_body", True)
                and headers.get(b"expect") is None
                and said <= self.most_dropped
            )
            while more and taken <= self.most_dropped:
                message = await receive()
                taken += len(message.get("body", b""))
                more = message.get("more_body", False)
            raise HTTPException(
                413, f"The body has over {self.limit:,} bytes, more than this model could take."
            )

        headers = dict(scope.get("headers", ()))
        length = headers.get(b"content-length", b"")
        said = int(length[:MOST_DIGITS]) if length.isdigit() else 0
        await self.app(scope, counted if scope["type"] == "http" else receive, send)
