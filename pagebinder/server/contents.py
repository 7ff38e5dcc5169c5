"""In which form a chat template takes the contents of messages: strings, or lists of parts.

Templates of multimodal models take lists, often of users alone: `messages[0]['content'] | trim` of a system message
makes Python's text of a list. So each role is asked for once, by a text that shows whether the template looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARK = "pagebinder"
Part = Mapping[str, Any]


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
            as_list = [{"type": "text", "text": MARK}]
            shows = [self._shows(role, MARK), self._shows(role, as_list)]
            if shows == [False, False] and role != "user":  # it may want others, as users' in front
                return self.wants_parts("user")
            self._wants_parts[role] = shows == [False, True]
        return self._wants_parts[role]

    def _shows(self, role: str, content: str | list[Part]) -> bool:
        user = {"role": "user", "content": content}
        asked = {"role": role, "content": content}
        conversations = {"user": [asked], "system": [asked, user], "assistant": [user, asked, user]}
        conversation = conversations.get(role, [user, asked])
        try:
            return self._render(conversation).count(MARK) == len(conversation)
        except Exception:  # whatever a template does with a conversation it was not written for
            return False
