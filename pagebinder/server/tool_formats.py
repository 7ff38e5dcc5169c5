"""How a chat template writes calls of tools: found by asking it, not from a list of model families.

A template renders a conversation whose assistant calls a function of ours; what stands around its name and arguments
is the format that the model has learned:

    asked     Content <tool_call>\\n{"name": "F", "arguments": {"K": "V"}}\\n</tool_call><|im_end|>
              ^^^^^^^ |  opening           | name |  middle       | arguments |  closing |  end of turn

Arguments are a JSON object (Hermes, Qwen, Llama 3, Mistral, DeepSeek), or keys and values each in marks of their own
(`Pairs`: Qwen3-Coder, GLM). Where a JSON value holds the name, too, another order of its keys is read as well
(`Wrapped`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

CONTENT, NAME, OTHER_NAME = "pagebinder says", "pagebinder_function", "pagebinder_other"
IDS = ("pagebind1", "pagebind2")  # Mistral's templates want nine letters and digits
KEY, OTHER_KEY, VALUE, NUMBER = "pagebinder_key", "pagebinder_next", "pagebinder value", 7202
ARGUMENTS = {KEY: VALUE, OTHER_KEY: NUMBER}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A function.",
            "parameters": {
                "type": "object",
                "properties": {KEY: {"type": "string"}, OTHER_KEY: {"type": "integer"}},
                "required": [KEY, OTHER_KEY],
            },
        },
    }
    for name in (NAME, OTHER_NAME)
]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Models write line ends into strings; NaN no client could read.
DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)

Json = dict[str, Any]
Render = Callable[..., str]  # (conversation, *, tools, add_generation_prompt) -> text


@dataclass(frozen=True)
class Wrapped:
    """The JSON value that holds a call: where in it name, arguments and id are, as keys from the outside, and `keys`,
    all that it has there. `in_list`: one list holds all calls."""

    keys: tuple[str, ...]
    name: tuple[str, ...]
    arguments: tuple[str, ...]
    id: tuple[str, ...] | None
    in_list: bool


@dataclass(frozen=True)
class Pairs:
    """Arguments as pairs: `key` stands between a key and its value, `next` between a value and the next key, `none`
    behind the name of a call without arguments; None: the template does not take one."""

    key: str
    next: str
    none: str | None = None


@dataclass(frozen=True)
class CallFormat:
    """What stands around a call's name and arguments. `between`: from the arguments of a call to the name of the next
    one; None: a turn has one call. Texts may hold one of IDS, in the place of an id."""

    opening: str
    middle: str
    closing: str
    between: str | None
    wrapped: Wrapped | None = None
    pairs: Pairs | None = None

    @property
    def mark(self) -> str:
        """With what calls begin, up to a JSON value that holds the name. "": they are nothing but that value."""
        return self.opening[: _begin_of_json(self.opening)].rstrip() if self.wrapped else self.opening

    @property
    def end(self) -> str:
        """What stands behind the last call: behind its arguments, or the whole value that holds it."""
        return self.closing.strip() if self.wrapped is None else self._behind_value(self.closing).strip()

    @property
    def between_values(self) -> str | None:
        """What stands between two values of calls behind one mark; None: each has its own mark, or a list has all."""
        if self.wrapped is None or self.wrapped.in_list or self.between is None:
            return None
        rest = self._behind_value(self.between)
        before_next = rest[: len(rest) - len(self.opening[_begin_of_json(self.opening) :])]
        return None if self.mark and self.mark in before_next else before_next

    def _behind_value(self, closing: str) -> str:
        text = f"{self.opening}{NAME}{self.middle}{{}}{closing}"
        return text[json_at(text, _begin_of_json(text))[1] :]

    @property
    def texts(self) -> tuple[str, ...]:
        """All that must be read to find calls."""
        pairs = () if self.pairs is None else (self.pairs.key, self.pairs.next)
        return (self.opening, self.middle, self.between or "", *pairs, self.end)


@dataclass(frozen=True)
class MessageForm:
    """How the template takes an assistant's message with calls: arguments as their text or as an object, and with an
    empty content where there is none."""

    arguments_as_text: bool
    empty_content: bool

    def calls(self, calls: Sequence[Mapping[str, Any]]) -> Json:
        """The fields of a message. `calls`: id, name and arguments (an object) of each."""
        made = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.dumps(call["arguments"], ensure_ascii=False)
                    if self.arguments_as_text
                    else call["arguments"],
                },
            }
            for call in calls
        ]
        return {"tool_calls": made} | ({"content": ""} if self.empty_content else {})


AS_OBJECTS = MessageForm(arguments_as_text=False, empty_content=False)  # transformers' own convention
FORMS = [MessageForm(as_text, empty) for as_text in (False, True) for empty in (False, True)]


class UnknownFormatError(ValueError):
    """Why a template's calls cannot be read; the message goes on from "the chat template"."""


def find_format(render: Render, ends: Collection[str]) -> tuple[CallFormat, MessageForm]:
    """Asks a template. `ends`: texts of the tokens that end a turn.

    Raises UnknownFormatError: it shows no tools or calls, or writes them in a way that is not understood.
    """
    template = _Asked(render)
    if NAME not in template.asks:
        raise UnknownFormatError("shows the model no tools")
    takes_calls = False
    of_two = {form: template.turn(form, [NAME, OTHER_NAME]) for form in FORMS}
    for form in sorted(FORMS, key=lambda form: of_two[form] is None):
        alone = template.turn(form, [NAME])
        takes_calls |= alone is not None
        one = alone and (template.turn(form, [NAME], CONTENT) or alone)
        found = None if one is None else _parts(one)
        if found is None:
            continue
        before, middle, after, pairs = found
        opening, closing = template.behind_content(before), template.without_end(after, ends)
        if any(part in opening for part in (template.end_of_turn(), template.begin_of_turn()) if part):
            raise UnknownFormatError("ends the assistant's turn before a call")
        between = _between(of_two[form], middle, pairs)
        wrapped = None if pairs else _wrapping(opening + NAME + middle, closing)
        if pairs is not None and (empty := template.turn(form, [NAME], arguments={})) is not None:
            none = template.without_end(empty[empty.rindex(NAME) + len(NAME) :], ends)
            pairs = dataclasses.replace(pairs, none=none)
        return CallFormat(opening, middle, closing, between, wrapped, pairs), form
    if takes_calls:
        raise UnknownFormatError("writes the arguments of calls in a form that is not understood")
    raise UnknownFormatError(
        "does not take messages that hold calls of tools, or does not write what is called"
    )


class _Asked:
    """A template and what it makes of conversations. `asks`, `shown`: of a user's message, with and without what
    asks for the answer."""

    USER: ClassVar = {"role": "user", "content": "x"}

    def __init__(self, render: Render) -> None:
        self._render = render
        self.asks, self.shown = self.text(), self.text(asks=False)

    def text(self, *messages: Json, asks: bool = True) -> str:
        try:
            return self._render([self.USER, *messages], tools=TOOLS, add_generation_prompt=asks)
        except Exception:  # whatever a template does with a conversation it was not written for
            return ""

    def turn(
        self, form: MessageForm, names: Sequence[str], content: str | None = None, arguments: Json = ARGUMENTS
    ) -> str | None:
        """The text of a conversation whose assistant says `content` and calls `names`; None: it does not show it."""
        calls = [{"id": i, "name": name, "arguments": arguments} for i, name in zip(IDS, names)]
        message = {"role": "assistant", **form.calls(calls)} | ({"content": content} if content else {})
        text = self.text(message, asks=False)
        shows_calls = all(text.count(word) > self.shown.count(word) for word in (*names, *arguments))
        return text if shows_calls and (content or "") in text else None

    def behind_content(self, before: str) -> str:
        """What begins the calls: behind the content, or behind what asks for the answer."""
        if CONTENT in before:
            return before[before.rindex(CONTENT) + len(CONTENT) :].lstrip()
        if before.startswith(self.asks):
            return before[len(self.asks) :].lstrip()
        raise UnknownFormatError(
            "begins an assistant's turn that holds calls in another way than one that is asked for "
            f"({before[len(self.shown) :]!r})"
        )

    def without_end(self, after: str, ends: Collection[str]) -> str:
        """What stands behind the arguments, without the end of the turn."""
        places = [after.find(end) for end in ends if end]
        if found := [place for place in places if place >= 0]:
            return after[: min(found)].rstrip()
        return after.rstrip().removesuffix(self.end_of_turn()).rstrip()

    def begin_of_turn(self) -> str:
        """What asks for an answer."""
        return self.asks[len(self.shown) :].strip() if self.asks.startswith(self.shown) else ""

    def end_of_turn(self) -> str:
        """What stands behind the content of an answer without calls."""
        said = self.text({"role": "assistant", "content": CONTENT}, asks=False)
        return said[said.rindex(CONTENT) + len(CONTENT) :].strip() if CONTENT in said else ""


def _parts(text: str) -> tuple[str, str, str, Pairs | None] | None:
    """(what stands before the name, between it and the arguments, behind them, how pairs are written or None)."""
    name = text.rindex(NAME)  # tools are shown before
    behind = name + len(NAME)
    for begin in (i for i, c in enumerate(text[behind:], behind) if c == "{"):
        value, end = json_at(text, begin)
        if value == ARGUMENTS:
            return text[:name], text[behind:begin], text[end:], None
    places = [text.find(part, behind) for part in (KEY, VALUE, OTHER_KEY, str(NUMBER))]
    if sorted(places) != places or -1 in places:
        return None
    key, value, other, number = places
    marks = text[key + len(KEY) : value], text[value + len(VALUE) : other]
    if not all(marks) or text[other + len(OTHER_KEY) : number] != marks[0]:
        return None  # numbers are written in another way than texts
    return text[:name], text[behind:key], text[number + len(str(NUMBER)) :], Pairs(*marks)


def json_at(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value that begins there, and its end; (None, begin) where there is none."""
    try:
        return DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, begin


def _between(text: str | None, middle: str, pairs: Pairs | None) -> str | None:
    """What stands between the arguments of one call and the name of the next.

    Raises UnknownFormatError: the second one is written in another way, numbered for example.
    """
    if text is None:
        return None
    other = text.rindex(OTHER_NAME)
    found = _parts(text[:other])
    if found is None or (found[3] is None) != (pairs is None):
        return None
    behind = text[other + len(OTHER_NAME) :]
    if not behind.startswith(middle.replace(IDS[0], IDS[1])):
        raise UnknownFormatError("writes the second call of a turn in another way than the first")
    return found[2]


def _wrapping(before_arguments: str, closing: str) -> Wrapped | None:
    """How one JSON value holds a whole call, if one does."""
    text = before_arguments + json.dumps(ARGUMENTS) + closing
    begin = _begin_of_json(text)
    if begin >= text.index(NAME):
        return None
    value, _ = json_at(text, begin)
    in_list = isinstance(value, list)
    item = value[0] if in_list else value
    name, arguments, number = (_path_to(wanted, item) for wanted in (NAME, ARGUMENTS, IDS[0]))
    if name is None or arguments is None:
        return None
    return Wrapped(tuple(item), name, arguments, number, in_list)


def _begin_of_json(text: str) -> int:
    """Where a JSON object, or a list of them, begins that is not closed before the text ends."""
    for i, c in enumerate(text):
        if c == "{" or (c == "[" and text[i + 1 :].lstrip()[:1] == "{"):
            return i
    return len(text)


def _path_to(wanted: Any, value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, dict):
        return None
    for key, inner in value.items():
        if inner == wanted:
            return (key,)
        if (path := _path_to(wanted, inner)) is not None:
            return (key, *path)
    return None
