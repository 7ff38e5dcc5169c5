"""What clients get back: choices, pieces of a stream, log-probabilities and usage, as OpenAI's API has them.

Ours beside it: `token_ids` of a choice, where asked for (`return_token_ids`) or where the model has no tokenizer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pagebinder.runtime.outputs import RequestOutput
from pagebinder.server.protocol import ChatBody, Sampling
from pagebinder.server.token_texts import TokenTexts

Json = dict[str, Any]
FINISH_REASONS = {"abort": "stop"}  # the protocol has no word for the others


@dataclass(frozen=True)
class Piece:
    """What came since the last piece. `logprobs` and `offsets` are of each token, if they were asked for."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    offsets: list[int] | None
    finish_reason: str | None


class Progress:
    """How much of an output a client has had."""

    def __init__(self) -> None:
        self.num_chars = self.num_tokens = 0

    def take(self, output: RequestOutput) -> Piece:
        """The rest."""
        chars, tokens = self.num_chars, self.num_tokens
        text, token_ids = output.text or "", output.token_ids
        self.num_chars, self.num_tokens = len(text), len(token_ids)
        logprobs = offsets = None
        if (values := output.logprobs) is not None:
            logprobs = values[tokens:]
            offsets = (output.text_offsets or [0] * len(token_ids))[tokens:]
        return Piece(text[chars:], token_ids[tokens:], logprobs, offsets, finish_reason_of(output))


def finish_reason_of(output: RequestOutput) -> str | None:
    return FINISH_REASONS.get(output.finish_reason or "", output.finish_reason)


class Answer:
    """To one HTTP request: `n` samples of each of its prompts, in this order."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    piece_object: ClassVar[str]

    def __init__(self, model: str, tokenizer: Any, body: Sampling) -> None:
        self.tokens = TokenTexts(tokenizer)
        self.num_samples = body.n or 1
        self.shows_ids = body.return_token_ids or tokenizer is None
        self.shows_usage = body.includes_usage
        self.head: Json = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = [self._choice(place, Progress().take(output)) for place, output in enumerate(outputs)]
        return {**self.head, "object": self.whole_object, "choices": choices, "usage": self._usage(outputs)}

    def opening(self, num_choices: int) -> list[Json]:
        """Sent before the first token."""
        return []

    def piece(self, place: int, piece: Piece) -> Json | None:
        """None: there is nothing to say yet, as text is held back until its characters are whole."""
        silent = not piece.text and piece.finish_reason is None
        if silent and not (piece.token_ids and (self.shows_ids or piece.logprobs is not None)):
            return None
        return self._event([self._piece_choice(place, piece)])

    def closing(self, outputs: Sequence[RequestOutput]) -> list[Json]:
        """Sent after the last token."""
        return [{**self._event([]), "usage": self._usage(outputs)}] if self.shows_usage else []

    def _event(self, choices: list[Json]) -> Json:
        return {**self.head, "object": self.piece_object, "choices": choices}

    def _choice(self, place: int, piece: Piece) -> Json:
        raise NotImplementedError

    def _piece_choice(self, place: int, piece: Piece) -> Json:
        raise NotImplementedError

    def _ids(self, piece: Piece) -> Json:
        return {"token_ids": piece.token_ids} if self.shows_ids else {}

    def _usage(self, outputs: Sequence[RequestOutput]) -> Json:
        """The samples of a prompt share it: it counts once."""
        firsts = outputs[:: self.num_samples]
        prompt = sum(len(output.prompt_token_ids) + output.num_encoder_tokens for output in firsts)
        completion = sum(output.num_tokens for output in outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in firsts)},
        }


class CompletionAnswer(Answer):
    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def _choice(self, place: int, piece: Piece) -> Json:
        return {
            "index": place, "text": piece.text, "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason, **self._ids(piece),
        }  # fmt: skip

    _piece_choice = _choice

    def _logprobs(self, piece: Piece) -> Json | None:
        if piece.logprobs is None:
            return None
        by_token = list(zip(piece.token_ids, piece.logprobs))
        return {
            "tokens": [self.tokens.text(i) for i in piece.token_ids],
            "token_logprobs": [values[i] for i, values in by_token],
            "top_logprobs": [self._top(values) for values in piece.logprobs],
            "text_offset": piece.offsets,
        }

    def _top(self, values: dict[int, float]) -> dict[str, float]:
        """By text; of tokens with the same text the likeliest."""
        rising = sorted(values.items(), key=lambda item: item[1])
        return {self.tokens.text(i): value for i, value in rising}


class ChatAnswer(Answer):
    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Any, body: ChatBody) -> None:
        super().__init__(model, tokenizer, body)
        self.num_top = body.top_logprobs or 0

    def opening(self, num_choices: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [self._event([self._said({"delta": delta}, place)]) for place in range(num_choices)]

    def _choice(self, place: int, piece: Piece) -> Json:
        return self._said({"message": {"role": "assistant", "content": piece.text}}, place, piece)

    def _piece_choice(self, place: int, piece: Piece) -> Json:
        return self._said({"delta": {"content": piece.text} if piece.text else {}}, place, piece)

    def _said(self, what: Json, place: int, piece: Piece | None = None) -> Json:
        if piece is None:
            return {"index": place, **what, "logprobs": None, "finish_reason": None}
        return {
            "index": place, **what, "logprobs": self._logprobs(piece), "finish_reason": piece.finish_reason,
            **self._ids(piece),
        }  # fmt: skip

    def _logprobs(self, piece: Piece) -> Json | None:
        if piece.logprobs is None:
            return None
        entries = []
        for token_id, values in zip(piece.token_ids, piece.logprobs):
            falling = sorted(values.items(), key=lambda item: -item[1])
            top = [self._entry(i, value) for i, value in falling[: self.num_top]]
            entries.append({**self._entry(token_id, values[token_id]), "top_logprobs": top})
        return {"content": entries}

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self.tokens.text(token_id),
            "logprob": logprob,
            "bytes": self.tokens.bytes(token_id),
        }
