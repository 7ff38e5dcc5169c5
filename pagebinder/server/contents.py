"""In which form a chat template takes the contents of messages: strings, or lists of parts.

Templates of multimodal models take lists, often of users alone: `messages[0]['content'] | trim` of a system message
makes Python's text of a list. So each role is asked for once, by a text that shows whether the template looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARK = "pagebinder"
AS_PARTS = ({"type": "text", "text": MARK},)
Part = Mapping[str, Any]


def rendered(
    renderer: Any,
    template: str | None,
    conversation: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """The text that asks for the assistant's answer, by `template` or the tokenizer's or processor's own."""
    options = {"add_generation_prompt": True} | dict(variables)
    return renderer.apply_chat_template(list(conversation), chat_template=template, tokenize=False, **options)


class ContentForms:
    """`render`: makes the text of a conversation by the template that is asked about."""

    def __init__(self, render: Callable[[list[dict[str, Any]]], str]) -> None:
        self._render = render
        self._wants_parts: dict[str, bool] = {}  # by role

    def content(self, role: str, parts: Sequence[Part]) -> str | list[Part]:
        """The content of a message as the template takes it; with an image, a list in any case."""
        if any(part["type"] != "text" for part in parts) or self.wants_parts(role):
            return list(parts)
        return "".join(part["text"] for part in parts)

    def wants_parts(self, role: str) -> bool:
        """Does the template render nothing of a string in a message of this role, but of a list of parts?"""
        if role not in self._wants_parts:
            shows = [self._shows(role, content) for content in (MARK, list(AS_PARTS))]
            if shows == [False, False] and role != "user":  # it may want such messages elsewhere, or nowhere
                return self.wants_parts("user")
            self._wants_parts[role] = shows == [False, True]
        return self._wants_parts[role]

    def _shows(self, role: str, content: str | list[Part]) -> bool:
        asked = {"role": role, "content": content}
        if role == "user":
            conversation = [asked]
        else:
            user = {"role": "user", "content": self.content("user", AS_PARTS)}
            conversation = {"system": [asked, user], "assistant": [user, asked, user]}.get(
                role, [user, asked]
            )
        try:
            text = self._render(conversation)
        except Exception:  # whatever a template does with a conversation it was not written for
            return False
        as_python = repr("type") in text  # a list that was printed
        return text.count(MARK) == len(conversation) and not as_python
