"""Conversations become prompts by the checkpoint's chat template, which transformers renders."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from pagebinder.errors import ConfigError, RequestError
from pagebinder.runtime.saved_tokenizer import SavedTokenizer
from pagebinder.server.contents import ContentForms, rendered
from pagebinder.server.media import NO_IMAGES, MediaPrompts, PixelRoom, image_part
from pagebinder.server.prompt_limits import PromptLimit
from pagebinder.server.protocol import Message
from pagebinder.server.tool_formats import (
    AS_OBJECTS,
    CallFormat,
    MessageForm,
    UnknownFormatError,
    find_format,
)

OURS = {
    "conversation",
    "messages",
    "chat_template",
    "tokenize",
    "tools",
    "documents",
    "return_dict",
    "return_tensors",
}


class ChatTemplate:
    """The template of a tokenizer (transformers', or a saved one with its files beside it), or `text` instead.

    `media`: makes prompts of conversations with images, by its own template or `text`. `fallback`: the template where
    neither the tokenizer nor `text` has one. `ends`: tokens that end an assistant's turn.
    Raises ConfigError: `text` is no Jinja template.
    """

    def __init__(
        self, tokenizer: Any, text: str | None = None, media: MediaPrompts | None = None,
        fallback: str | None = None, ends: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._tokenizer, self._text, self._media, self._ends = tokenizer, text, media, ends
        self._forms = ContentForms(lambda conversation: self._render(conversation, {}))
        if text is not None and tokenizer is not None:
            self._check_syntax()
        if (
            text is None
            and fallback is not None
            and tokenizer is not None
            and not self._renderer.chat_template
        ):
            self._text = fallback

    def _check_syntax(self) -> None:
        try:
            self._render([{"role": "user", "content": "x"}], {})
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"The chat template is wrong in line {error.lineno}: {error.message}"
            ) from error
        except Exception:  # it may want other conversations
            return

    def _render(self, conversation: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        return rendered(self._renderer, self._text, conversation, variables)

    @functools.cached_property
    def _renderer(self) -> Any:
        if not isinstance(self._tokenizer, SavedTokenizer):
            return self._tokenizer
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(
            str(self._tokenizer.path.parent), local_files_only=True
        )

    def problem(self) -> str | None:
        """Why conversations cannot be served; None: they can."""
        if self._tokenizer is None:
            return "The model has no tokenizer, so there are no conversations: use /v1/completions with token ids."
        if self._text is None and not self._renderer.chat_template:
            return (
                "The model's directory has no chat template, so conversations cannot be served: use "
                "/v1/completions, or start the server with --chat-template FILE (Jinja)."
            )
        return None

    @functools.cached_property
    def _calls(self) -> tuple[CallFormat, MessageForm] | UnknownFormatError:
        """How calls of tools are written, or why that is not known."""
        ends = [self._tokenizer.backend_tokenizer.id_to_token(token) or "" for token in self._ends]
        try:
            return find_format(lambda conversation, **options: self._render(conversation, options), ends)
        except UnknownFormatError as error:
            return error

    def call_format(self) -> CallFormat:
        """Of calls of tools. Raises RequestError: conversations are not served, or calls could not be found."""
        if (problem := self.problem()) is not None:
            raise RequestError(problem)
        if isinstance(self._calls, UnknownFormatError):
            raise RequestError(f"tools are not served with this model: its chat template {self._calls}.")
        return self._calls[0]

    def prompt(
        self, messages: Sequence[Message], variables: dict[str, Any], limit: PromptLimit | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list:  # fmt: skip
        """The prompt that asks for the assistant's answer: token ids, and embeddings where there are images. `tools`:
        those that the model is told of.

        Raises:
            RequestError: there is none, or it is too long.
        """
        if taken := sorted(OURS & variables.keys()):
            raise RequestError(f"chat_template_kwargs may not hold {', '.join(taken)}.")
        images = holds_images(messages)
        if images and (self._media is None or self._media.problem is not None):
            raise RequestError(NO_IMAGES if self._media is None else self._media.problem)
        room = PixelRoom()
        contents = [_parts(number, message, room) for number, message in enumerate(messages)]
        if tools:
            variables = {**variables, "tools": list(tools)}
        if not images:
            return self._token_ids(messages, contents, variables, limit)
        if limit is not None:
            limit.check("".join(part.get("text", "") for parts in contents for part in parts))
        return self._media.prompt(self._conversation(messages, contents, self._media.forms), variables)

    def _token_ids(
        self,
        messages: Sequence[Message],
        contents: list,
        variables: dict[str, Any],
        limit: PromptLimit | None,
    ) -> list[int]:
        problem = self.problem()
        if problem is not None:
            raise RequestError(problem)
        try:
            text = self._render(self._conversation(messages, contents, self._forms), variables)
        except Exception as error:  # whatever a template does with a conversation it was not written for
            raise RequestError(f"The chat template does not take this conversation: {error}") from error
        if limit is not None:
            limit.check(text)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _conversation(
        self, messages: Sequence[Message], contents: Sequence[list], forms: ContentForms
    ) -> list[dict[str, Any]]:
        """The messages as a template takes them. `contents`: as parts."""
        conversation = []
        for message, parts in zip(messages, contents):
            fields = message.model_dump(exclude_none=True)
            if message.tool_calls:
                form = AS_OBJECTS if isinstance(self._calls, UnknownFormatError) else self._calls[1]
                calls = [{"id": c.id, **c.function.model_dump()} for c in message.tool_calls]
                fields |= form.calls(calls)
            else:
                fields.pop("tool_calls", None)
            if message.content is not None:
                fields["content"] = forms.content(message.role, parts)
            conversation.append(fields)
        return conversation


def holds_images(messages: Sequence[Message]) -> bool:
    """Is there a part of an image, before anybody looks into it?"""
    contents = (message.content for message in messages if isinstance(message.content, list))
    return any(part.get("type") == "image_url" for content in contents for part in content)


def stored_template(folder: Path | None) -> str | None:
    """Of a processor that was saved by an older transformers, in a file of its own that tokenizers do not read."""
    try:
        stored = json.loads((folder / "chat_template.json").read_text()) if folder is not None else None
    except (OSError, ValueError):
        return None
    text = stored.get("chat_template") if isinstance(stored, dict) else None
    return text if isinstance(text, str) else None


def _parts(number: int, message: Message, room: PixelRoom) -> list[dict[str, Any]]:
    """A message's content as parts, texts and images, these as `room` has place for their pixels.

    Raises RequestError: it has others, or none has place.
    """
    if message.content is None:
        return []
    if isinstance(message.content, str):
        return [{"type": "text", "text": message.content}]
    parts = []
    for at, part in enumerate(message.content):
        where = f"messages[{number}].content[{at}]"
        if "type" not in part:
            raise RequestError(f'{where} has no type: use "text", and put the text into "text".')
        if part["type"] == "image_url":
            parts.append(image_part(part, where, room))
        elif part["type"] != "text":
            raise RequestError(f"{where} is no text or image ({part['type']}): only these are served.")
        elif not isinstance(part.get("text"), str):
            raise RequestError(f'{where} has the type "text" and no string "text".')
        else:
            parts.append({"type": "text", "text": part["text"]})
    return parts
