"""Grammars that make a model call tools: in its chat template's format, with arguments that their schemas admit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagebinder.errors import RequestError
from pagebinder.guides import Choice, Grammar, JsonSchema, Regex
from pagebinder.server.protocol import ChatBody, NamedTool
from pagebinder.server.tool_call_kinds import Tool
from pagebinder.server.tool_formats import IDS, CallFormat

# As templates write JSON, and so models: one blank behind each comma and colon, no line ends.
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Guide = Choice | Grammar | JsonSchema | Regex


def guide_of_choice(
    form: CallFormat,
    tools: Sequence[Tool],
    body: ChatBody,
    of_answer: Guide | None,
    added_tokens: Mapping[str, int],
) -> Guide | None:
    """What `tool_choice` and the guide of an answer without calls ask for together.

    Raises RequestError: that is not built.
    """
    choice, several = body.tool_choice, body.parallel_tool_calls is not False
    if choice in (None, "auto"):
        if of_answer is None:
            return None
        if not isinstance(of_answer, JsonSchema):
            raise RequestError(
                "tools go with a JSON schema for the answer (response_format), and with no other structured_outputs."
            )
    elif of_answer is not None:
        raise RequestError(
            "tool_choice asks for a call, and response_format or structured_outputs for an answer."
        )
    if form.pairs is not None:
        raise RequestError(
            "This model's calls are no JSON: serve it with tool_choice auto or none, without a response_format."
        )
    if isinstance(choice, NamedTool):
        tools, several = [tool for tool in tools if tool.name == choice.function.name], False
    return _calls(form, tools, added_tokens, several=several, instead=of_answer)


def _calls(
    form: CallFormat,
    tools: Sequence[Tool],
    added_tokens: Mapping[str, int],
    *,
    several: bool,
    instead: JsonSchema | None,
) -> Grammar:
    """Calls of some of `tools`, whose arguments are JSON in this format. `several`: one or more of them. `instead`:
    an answer that may come in their place."""

    def literal(text: str) -> str:
        """This text, with any id where it has one of ours. Added tokens are none of a grammar's text."""
        places = {token: f"<[{token_id}]>" for token, token_id in added_tokens.items()} | dict.fromkeys(
            IDS, "ID"
        )
        parts = re.split("(" + "|".join(map(re.escape, sorted(places, key=len, reverse=True))) + ")", text)
        return " ".join(places.get(part) or json.dumps(part, ensure_ascii=False) for part in parts if part)

    more = f"( {literal(form.between)} call )*" if several and form.between else ""
    rules = {
        "start": "calls" if instead is None else "calls | answer",
        "calls": f"{literal(form.opening)} call {more} {literal(form.closing)}",
        "call": " | ".join(
            f"{json.dumps(tool.name)} {literal(form.middle)} arguments_{i}" for i, tool in enumerate(tools)
        ),
        **{f"arguments_{i}": _json(tool.parameters) for i, tool in enumerate(tools)},
        **({} if instead is None else {"answer": f"%json {instead.schema}"}),
        **(
            {"ID": "/[a-zA-Z0-9]{9}/"}
            if any(i in text for i in IDS for text in (form.opening, form.middle, form.closing))
            else {}
        ),
    }
    return Grammar("".join(f"{name}: {rule}\n" for name, rule in rules.items()))


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({"type": "object", **schema, "x-guidance": SPACES}, ensure_ascii=False)
