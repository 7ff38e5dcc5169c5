"""Answers of models that were shown tools: content, and calls as OpenAI's API has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from pagebinder.runtime.detokenizer import Detokenizer
from pagebinder.server.answers import ChatAnswer, Json, Piece
from pagebinder.server.protocol import ChatBody
from pagebinder.server.tool_call_kinds import Call, Tool
from pagebinder.server.tool_calls import CallReader, News
from pagebinder.server.tool_formats import CallFormat


class ToolAnswer(ChatAnswer):
    """`form`: how the model writes calls of `tools`."""

    def __init__(
        self, model: str, tokenizer: Any, body: ChatBody, form: CallFormat, tools: Sequence[Tool]
    ) -> None:
        super().__init__(model, tokenizer, body)
        marks, samples = added_marks(tokenizer, form, special=True), range(self.num_samples)
        several = body.parallel_tool_calls is not False
        self._readers = [CallReader(form, tools, several=several) for _ in samples]
        self._texts = [_MarkedText(tokenizer, marks, body.stop_strings) if marks else None for _ in samples]

    def _choice(self, place: int, piece: Piece) -> Json:
        news, piece = self._read(place, piece)
        message = {"role": "assistant", "content": piece.text if piece.text or not news.calls else None}
        if news.calls:
            message["tool_calls"] = [_call(call) for call in news.calls]
        return self._said({"message": message}, place, piece)

    def piece(self, place: int, piece: Piece) -> Json | None:
        first = self._readers[place].num_calls
        news, piece = self._read(place, piece)
        if not news.calls:
            return super().piece(place, piece)
        calls = [{"index": first + i, **_call(call)} for i, call in enumerate(news.calls)]
        delta = {"content": piece.text} if piece.text else {}
        return self._event([self._said({"delta": delta | {"tool_calls": calls}}, place, piece)])

    def _read(self, place: int, piece: Piece) -> tuple[News, Piece]:
        """What is new, and the piece with the content of that alone."""
        finished, marked = piece.finish_reason is not None, self._texts[place]
        text = piece.text if marked is None else marked.read(piece.token_ids, finished)
        news = self._readers[place].read(text, finished=finished)
        reason = piece.finish_reason
        if reason == "stop" and self._readers[place].num_calls:
            reason = "tool_calls"
        return news, dataclasses.replace(piece, text=news.content, finish_reason=reason)


def _call(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def added_marks(tokenizer: Any, form: CallFormat, *, special: bool = False) -> dict[str, int]:
    """Added tokens in what calls are written with, which are one token wherever they stand. `special`: those of them
    that the text of an output leaves out."""
    texts = "\n".join(form.texts)
    return {token: i for token, i in _added_tokens(tokenizer, special).items() if token in texts}


def _added_tokens(tokenizer: Any, special: bool) -> dict[str, int]:
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special or not special}


class _MarkedText:
    """The text of an output with those special tokens that are `marks`."""

    def __init__(self, tokenizer: Any, marks: Collection[str], stop: Sequence[str]) -> None:
        self._left_out = {
            i for token, i in _added_tokens(tokenizer, special=True).items() if token not in marks
        }
        self._detokenizer = Detokenizer(tokenizer.backend_tokenizer, stop, skip_special_tokens=False)
        self._num_shown = 0

    def read(self, token_ids: Sequence[int], finished: bool) -> str:
        """The text of the tokens that came since the last time."""
        for token_id in token_ids:
            if token_id not in self._left_out and not self._detokenizer.stopped:
                self._detokenizer.append(token_id)
        if finished:
            self._detokenizer.finish()
        text = self._detokenizer.visible_text
        shown, self._num_shown = self._num_shown, len(text)
        return text[shown:]
