"""How calls of tools are read where one begins, by the kind of a template's format (tool_formats.py).

_WrappedCalls     <tool_call> {"name": "f", "arguments": {...}} </tool_call>       one JSON value, or a list of them
_NamedCalls       [TOOL_CALLS] f [ARGS] {...}                                      the name, and a JSON object
_CallsOfPairs     <function=f> <parameter=x> 1 </parameter> </function>            the name, and keys and values
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagebinder.server.tool_formats import IDS, CallFormat, json_at

ID_LENGTH, ID_CHARACTERS = 9, string.ascii_letters + string.digits  # what Mistral's templates take
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
AN_ID = r"[^\s<>\[\]{}|\"']+?"
NAME = r"[^\s\"'<>{}\[\]()|,\\`]+"  # of a function


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. `parameters`: the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """`arguments`: the text of a JSON object."""

    name: str
    arguments: str
    id: str


def calls_of(form: CallFormat, tools: Sequence[Tool]) -> Calls:
    """How calls in this format are read, of a model that was shown `tools`."""
    if form.wrapped is not None:
        return _WrappedCalls(form, tools)
    return _NamedCalls(form, tools) if form.pairs is None else _CallsOfPairs(form, tools)


def new_id() -> str:
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


def before_id(text: str) -> str:
    return re.split("|".join(IDS), text, maxsplit=1)[0]


def _flexible(mark: str) -> str:
    """An expression for a mark: white space within it may be other white space, at its ends it may be missing, and
    any id may stand where one of ours does."""
    words = r"\s*".join(AN_ID.join(map(re.escape, re.split("|".join(IDS), word))) for word in mark.split())
    if not words:
        return r"\s*"
    begin = mark[: len(mark) - len(mark.lstrip())]
    end = mark[len(mark.rstrip()) :]
    return f"(?:{re.escape(begin)})?{words}(?:{re.escape(end)})?"


class Calls:
    """How calls are read. `between`, `end`: what stands behind a call, before the next one or at last, without white
    space at its ends; `stops`: texts of which one comes before a call is whole."""

    between, end = "", ""
    stops: Sequence[str] = ()
    separators: Sequence[str] = ()  # what may stand before a next call beside `between`

    def __init__(self, form: CallFormat) -> None:
        self._start = "".join(before_id(form.opening).split())
        self._closing = re.compile(rf"\s*{_flexible(self.end)}") if self.end else None
        self._following = re.compile(rf"\s*{_flexible(self.between)}") if self.between else None

    def first(self, text: str, begin: int) -> tuple[list[Call], int] | None:
        """The calls that begin with a mark there, and their end; None: there is none, or it is not whole."""
        raise NotImplementedError

    def next(self, text: str, begin: int) -> tuple[list[Call], int] | None:
        """The same of one behind `between`."""
        raise NotImplementedError

    def may_begin(self, text: str, begin: int) -> bool:
        """Can what stands there still become a call?"""
        given = "".join(text[begin : begin + 2 * len(self._start) + 40].split())
        return self._start.startswith(given) or given.startswith(self._start)

    def has_next(self, text: str, begin: int) -> bool:
        return self._following is not None and self._following.match(text, begin) is not None

    def closes(self, text: str, begin: int) -> int | None:
        """Behind what closes calls there."""
        found = None if self._closing is None else self._closing.match(text, begin)
        return None if found is None else found.end()


class _WrappedCalls(Calls):
    """One JSON value for a call with its name, or for a list of calls. Behind one mark there may be several."""

    def __init__(self, form: CallFormat, tools: Sequence[Tool]) -> None:
        self._wrapped, self.end = form.wrapped, form.end
        self.stops = [self.end.split()[0]] if self.end and form.between_values is None else "}]"
        super().__init__(form)
        self._mark = re.compile(_flexible(form.mark) + r"\s*")
        self.separators = [*filter(None, [(form.between_values or "").strip()]), ";", ","]
        self._next = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self.separators))})?\s*(?={{)")
        self._names = None if form.mark else {tool.name for tool in tools}  # else other JSON would be a call
        self._keys = {*form.wrapped.keys, "type", *ARGUMENTS_KEYS}

    def first(self, text: str, begin: int) -> tuple[list[Call], int] | None:
        return self._value(text, self._mark.match(text, begin))

    def next(self, text: str, begin: int) -> tuple[list[Call], int] | None:
        return self._value(text, self._next.match(text, begin))

    def has_next(self, text: str, begin: int) -> bool:
        return self._next.match(text, begin) is not None

    def may_begin(self, text: str, begin: int) -> bool:
        """A mark, and behind it an object whose first key is one of a call's."""
        start = self._mark.match(text, begin)
        if start is None:
            return "".join(text[begin:].split()) in self._start
        head = text[start.end() : start.end() + 200]
        found = re.match(r"\[?\s*(?:\{\s*(?:\"(?P<key>[^\"]*)(?P<closed>\"?))?)?", head)
        if found["key"] is None:
            return not head[found.end() :].strip()
        return (
            found["key"] in self._keys
            if found["closed"]
            else any(k.startswith(found["key"]) for k in self._keys)
        )

    def _value(self, text: str, start: re.Match | None) -> tuple[list[Call], int] | None:
        if start is None:
            return None
        value, end = json_at(text, start.end())
        items = value if isinstance(value, list) else [value]
        calls = [self._call(item, text[start.end() : end]) for item in items]
        return (calls, end) if calls and None not in calls else None

    def _call(self, value: Any, text: str) -> Call | None:
        *path, key = self._wrapped.arguments
        holder, name = _inner(value, path), _inner(value, self._wrapped.name)
        if not isinstance(holder, dict) or not isinstance(name, str) or name not in (self._names or {name}):
            return None
        given = next((holder[k] for k in (key, *ARGUMENTS_KEYS) if k in holder), None)
        arguments, of = given, text
        if isinstance(given, str) and given.strip():  # JSON within JSON
            arguments, end = json_at(given.strip(), 0)
            of = given if end == len(given.strip()) else ""
        if not isinstance(arguments, dict) and given not in (None, ""):
            return None
        given_id = _inner(value, self._wrapped.id or ())
        return _call(name, arguments or {}, of, given_id if isinstance(given_id, str) else None)


ARGUMENTS_KEYS = ("arguments", "parameters")


def _inner(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _call(name: str, arguments: Mapping[str, Any], text: str, given_id: str | None = None) -> Call:
    return Call(name, _written(arguments, text), given_id or new_id())


def _written(arguments: Mapping[str, Any], text: str) -> str:
    """The arguments as the model wrote them, somewhere in `text`, or, where that is no JSON, written anew."""
    for begin in (found.start() for found in re.finditer(r"\{", text)):
        value, end = json_at(text, begin)
        if value == arguments:
            try:
                json.loads(text[begin:end])
                return text[begin:end]
            except ValueError:  # with a line end in a text
                break
    return json.dumps(arguments)


class _Named(Calls):
    """Calls whose name stands in marks of its own, and behind it the arguments."""

    def __init__(self, form: CallFormat, end: str, between: str) -> None:
        self.end, self.between = end.strip(), between.strip()
        super().__init__(form)
        self._openings = [
            re.compile(rf"\s*{_flexible(mark)}({NAME})") for mark in (form.opening, between) if mark
        ]

    def first(self, text: str, begin: int) -> tuple[list[Call], int] | None:
        return self._at(text, self._openings[0].match(text, begin))

    def next(self, text: str, begin: int) -> tuple[list[Call], int] | None:
        return self._at(text, self._openings[-1].match(text, begin))

    def _at(self, text: str, start: re.Match | None) -> tuple[list[Call], int] | None:
        found = None if start is None else self._arguments(text, start.end(), start[1])
        return None if found is None else ([_call(start[1], *found[:2])], found[2])

    def _arguments(self, text: str, begin: int, name: str) -> tuple[dict[str, Any], str, int] | None:
        """(the arguments, the text in which they stand as JSON, their end)."""
        raise NotImplementedError


class _NamedCalls(_Named):
    """Arguments are a JSON object."""

    stops = "}"

    def __init__(self, form: CallFormat, tools: Sequence[Tool]) -> None:
        super().__init__(form, form.closing, form.between or "")
        self._middle = re.compile(_flexible(form.middle) + r"\s*")

    def _arguments(self, text: str, begin: int, name: str) -> tuple[dict[str, Any], str, int] | None:
        middle = self._middle.match(text, begin)
        value, end = (None, begin) if middle is None else json_at(text, middle.end())
        return (value, text[middle.end() : end], end) if isinstance(value, dict) else None


class _CallsOfPairs(_Named):
    """Arguments are keys and values, each in marks. What a schema calls a string is one, all else is read as JSON."""

    def __init__(self, form: CallFormat, tools: Sequence[Tool]) -> None:
        of_call = _shared_begin(form.closing, form.between or form.closing)
        of_turn = form.closing[len(of_call) :]
        super().__init__(form, of_turn, (form.between or "")[len(of_call) :])
        properties = {tool.name: tool.parameters.get("properties") for tool in tools}
        self._properties = {name: given for name, given in properties.items() if isinstance(given, Mapping)}
        marks = {"middle": form.middle, "key": form.pairs.key, "next": form.pairs.next, "end": of_call}
        if form.pairs.none is not None:
            marks["none"] = form.pairs.none.removesuffix(of_turn)
        self._marks = {name: re.compile(_flexible(mark)) for name, mark in marks.items()}
        self._begin = form.mark.split(maxsplit=1)[0]
        self.stops = [
            marks[name].split()[-1] for name in ("end", "none") if name in marks and marks[name].strip()
        ]

    def _arguments(self, text: str, begin: int, name: str) -> tuple[dict[str, Any], str, int] | None:
        if (at := self._marks["middle"].match(text, begin)) is None:
            none = self._marks["none"].match(text, begin) if "none" in self._marks else None
            return None if none is None else ({}, "", none.end())
        arguments: dict[str, Any] = {}
        limit = text.find(self._begin, begin)  # another call
        limit = len(text) if limit < 0 else limit
        while True:
            key = self._marks["key"].search(text, at.end(), limit)
            if key is None:
                return None
            ends = (self._marks[which].search(text, key.end(), limit) for which in ("next", "end"))
            found = min((end for end in ends if end is not None), key=re.Match.start, default=None)
            if found is None:
                return None
            word = text[at.end() : key.start()].strip()
            described = self._properties.get(name, {}).get(word, {})
            arguments[word] = _typed(text[key.end() : found.start()], described)
            if found.re is self._marks["end"]:
                return arguments, "", found.end()
            at = found


CONSTANTS = {"True": True, "False": False, "None": None}  # as some templates write them


def _typed(text: str, described: Any) -> Any:
    """A value of a pair, by what its schema says of it."""
    types = _types(described)
    value, end = json_at(text.strip(), 0)
    is_json = end == len(text.strip()) and end > 0
    if not is_json and text.strip() in CONSTANTS and "string" not in types:
        value, is_json = CONSTANTS[text.strip()], True
    if "string" in types:
        return None if "null" in types and is_json and value is None else text
    return value if is_json else text


def _types(described: Any) -> set[str]:
    """The types that a schema names for a value; none: it says nothing of them."""
    if not isinstance(described, Mapping):
        return set()
    given = described.get("type")
    found = {given} if isinstance(given, str) else {one for one in given or () if isinstance(one, str)}
    for value in described.get("enum", ()) if isinstance(described.get("enum"), list) else ():
        found |= {"string"} if isinstance(value, str) else {"null"} if value is None else set()
    for name in ("anyOf", "oneOf"):
        for one in described.get(name, ()) if isinstance(described.get(name), list) else ():
            found |= _types(one)
    return found


def _shared_begin(one: str, other: str) -> str:
    """What two texts begin with, up to the end of its last mark."""
    same = next(
        (i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    return one[: one.rindex(">", 0, same) + 1] if ">" in one[:same] else one[:same]
