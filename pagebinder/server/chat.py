"""Conversations become prompts by the checkpoint's chat template, which transformers renders."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateSyntaxError

from pagebinder.errors import ConfigError, RequestError
from pagebinder.runtime.saved_tokenizer import SavedTokenizer
from pagebinder.server.prompt_limits import PromptLimit
from pagebinder.server.protocol import Message

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

    Raises ConfigError: `text` is no Jinja template.
    """

    def __init__(self, tokenizer: Any, text: str | None = None) -> None:
        self._tokenizer, self._text = tokenizer, text
        if text is not None and tokenizer is not None:
            self._check_syntax()

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
        options = {"add_generation_prompt": True} | variables
        return self._renderer.apply_chat_template(
            conversation, chat_template=self._text, tokenize=False, **options
        )

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

    def token_ids(
        self, messages: Sequence[Message], variables: dict[str, Any], limit: PromptLimit | None = None
    ) -> list[int]:
        """The prompt that asks for the assistant's answer. Raises RequestError: there is none, or it is too long."""
        problem = self.problem()
        if problem is not None:
            raise RequestError(problem)
        conversation = [_plain(number, message) for number, message in enumerate(messages)]
        if taken := sorted(OURS & variables.keys()):
            raise RequestError(f"chat_template_kwargs may not hold {', '.join(taken)}.")
        try:
            text = self._render(conversation, variables)
        except Exception as error:  # whatever a template does with a conversation it was not written for
            raise RequestError(f"The chat template does not take this conversation: {error}") from error
        if limit is not None:
            limit.check(text)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _plain(number: int, message: Message) -> dict[str, Any]:
    """A message with its content as one text. Raises RequestError: it has other parts."""
    fields = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        for at, part in enumerate(message.content):
            where = f"messages[{number}].content[{at}]"
            if "type" not in part:
                raise RequestError(f'{where} has no type: use "text", and put the text into "text".')
            if part["type"] != "text":
                raise RequestError(f"{where} is no text ({part['type']}): only text is served.")
            if not isinstance(part.get("text"), str):
                raise RequestError(f'{where} has the type "text" and no string "text".')
        fields["content"] = "".join(part["text"] for part in message.content)
    return fields
