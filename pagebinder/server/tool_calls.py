"""Calls of tools in what a model writes, in the format of its chat template (tool_formats.py).

    I look it up. <tool_call> {"name": "f", "arguments": {"x": 1}} </tool_call>
    content       |mark       JSON value                           dropped

Text is shown as soon as it cannot be the beginning of a mark, a call when its arguments are complete. What begins
like a call and is none stays text: nothing is lost.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagebinder.server.tool_formats import CallFormat, json_at

ID_LENGTH, ID_CHARACTERS = 9, string.ascii_letters + string.digits  # what Mistral's templates take
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
NAME = r"[^\s\"'<>{}\[\]()|,\\`]+"  # of a function
At = Callable[
    [str, int], tuple[list["Call"], int] | None
]  # (text, where) -> the calls that begin there, their end


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


@dataclass(frozen=True)
class News:
    """What a reader has found since the last time."""

    content: str
    calls: list[Call]


class CallReader:
    """Reads one answer, piece by piece, of a model that was shown `tools`."""

    def __init__(self, form: CallFormat, tools: Sequence[Tool]) -> None:
        kinds = {_WrappedCalls: form.wrapped, _CallsOfPairs: form.pairs}
        kind = next((kind for kind, is_it in kinds.items() if is_it is not None), _NamedCalls)
        self._calls = kind(form, tools)
        self._mark = form.mark.split(maxsplit=1)[0] if form.mark else ""
        self._text = ""
        self._at = self._tried = (
            0  # before it everything was told; how long the text was when a call was looked for
        )
        self._is_text = False  # to its end, as calls would be all there is
        self._behind_call = False
        self.num_calls = 0

    def read(self, text: str, *, finished: bool) -> News:
        """text: what came since the last time."""
        self._text += text
        content: list[str] = []
        calls: list[Call] = []
        while self._at < len(self._text):
            if self._behind_call:
                if not self._go_on(calls, finished):
                    break
                continue
            begin, is_whole = self._find_mark()
            content.append(self._text[self._at : begin])
            self._at = begin
            if not is_whole:
                break
            mark = self._text.index(self._mark, begin)
            if self._take(self._calls.first, mark, calls, finished):
                continue
            if not finished:
                break
            self._at = mark + max(len(self._mark), 1)  # it was none
            content.append(self._text[begin : self._at])
            self._is_text = not self._mark
        self.num_calls += len(calls)
        if finished:
            rest = self._text[self._at :]
            content.append(rest if rest.strip() or not self.num_calls else "")
            self._at = len(self._text)
        return News("".join(content), calls)

    def _find_mark(self) -> tuple[int, bool]:
        """(where what may be a call begins, with the white space before it; is its mark whole?)"""
        text = self._text
        if not self._mark:
            first = text[self._at :].lstrip()[:1]
            self._is_text |= bool(first) and first not in "{["
            return (len(text), False) if self._is_text else (self._at, bool(first))
        found = text.find(self._mark, self._at)
        is_whole = found >= 0
        if not is_whole:
            most = min(len(self._mark), len(text) - self._at)
            begun = (n for n in range(most, 0, -1) if text.endswith(self._mark[:n]))
            found = len(text) - next(begun, 0)
        while found > self._at and text[found - 1].isspace():
            found -= 1
        return found, is_whole

    def _take(self, at: At, begin: int, calls: list[Call], finished: bool) -> bool:
        """Pass the call that begins there. False: there is none, or it is not whole yet."""
        if not finished and not any(c in self._text[self._tried :] for c in self._calls.ends):
            return False
        found = at(self._text, begin)
        self._tried = len(self._text) if found is None else self._at
        if found is None:
            return False
        calls += found[0]
        self._at, self._behind_call = found[1], True
        return True

    def _go_on(self, calls: list[Call], finished: bool) -> bool:
        """Pass the next call or what closes the last one. False: it may still be coming."""
        rest = self._text[self._at :].lstrip()
        between, end = self._calls.between, self._calls.end
        if not finished and any(part.startswith(rest) for part in (between, end) if part):
            return False
        if between and rest.startswith(between):
            if self._take(self._calls.next, self._at, calls, finished):
                return True
            if not finished:
                return False
        elif end and rest.startswith(end):
            self._at = self._text.index(end, self._at) + len(end)
        self._behind_call = False
        return True


def new_id() -> str:
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


def _flexible(mark: str) -> str:
    """An expression for a mark: white space within it may be other white space, and at its ends it may be missing."""
    words = r"\s*".join(map(re.escape, mark.split()))
    if not words:
        return r"\s*"
    begin = mark[: len(mark) - len(mark.lstrip())]
    end = mark[len(mark.rstrip()) :]
    return f"(?:{re.escape(begin)})?{words}(?:{re.escape(end)})?"


class _WrappedCalls:
    """One JSON value for a call with its name, or for a list of calls."""

    ends, between = "}]", ""

    def __init__(self, form: CallFormat, tools: Sequence[Tool]) -> None:
        self._wrapped, self.end = form.wrapped, form.end
        self._begin = re.compile(_flexible(form.mark) + r"\s*")
        self._names = None if form.mark else {tool.name for tool in tools}  # else other JSON would be a call

    def first(self, text: str, begin: int) -> tuple[list[Call], int] | None:
        start = self._begin.match(text, begin)
        if start is None:
            return None
        value, end = json_at(text, start.end())
        calls = [self._call(item) for item in (value if isinstance(value, list) else [value])]
        return (calls, end) if calls and None not in calls else None

    next = first

    def _call(self, value: Any) -> Call | None:
        name, arguments = _inner(value, self._wrapped.name), _inner(value, self._wrapped.arguments)
        if isinstance(arguments, str):  # JSON within JSON
            arguments, _ = json_at(arguments.strip(), 0)
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            return None
        if self._names is not None and name not in self._names:
            return None
        given = _inner(value, self._wrapped.id or ())
        return _call(name, arguments or {}, given if isinstance(given, str) and given else None)


def _inner(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _call(name: str, arguments: Mapping[str, Any], given_id: str | None = None) -> Call:
    return Call(name, json.dumps(arguments, ensure_ascii=False), given_id or new_id())


class _Named:
    """Calls whose name stands in marks of its own, and behind it the arguments. `ends`: characters with which they
    may end; `between`, `end`: what stands behind them, before the next call or at last."""

    ends: str

    def __init__(self, form: CallFormat, end: str, between: str) -> None:
        self.end, self.between = end.strip(), between.strip()
        self._openings = [
            re.compile(rf"\s*{_flexible(mark)}({NAME})") for mark in (form.opening, between) if mark
        ]

    def first(self, text: str, begin: int) -> tuple[list[Call], int] | None:
        return self._at(text, self._openings[0].match(text, begin))

    def next(self, text: str, begin: int) -> tuple[list[Call], int] | None:
        return self._at(text, self._openings[-1].match(text, begin))

    def _at(self, text: str, start: re.Match | None) -> tuple[list[Call], int] | None:
        found = None if start is None else self._arguments(text, start.end(), start[1])
        return None if found is None else ([_call(start[1], found[0])], found[1])

    def _arguments(self, text: str, begin: int, name: str) -> tuple[dict[str, Any], int] | None:
        raise NotImplementedError


class _NamedCalls(_Named):
    """Arguments are a JSON object."""

    ends = "}"

    def __init__(self, form: CallFormat, tools: Sequence[Tool]) -> None:
        super().__init__(form, form.closing, form.between or "")
        self._middle = re.compile(_flexible(form.middle) + r"\s*")

    def _arguments(self, text: str, begin: int, name: str) -> tuple[dict[str, Any], int] | None:
        middle = self._middle.match(text, begin)
        value, end = (None, begin) if middle is None else json_at(text, middle.end())
        return (value, end) if isinstance(value, dict) else None


class _CallsOfPairs(_Named):
    """Arguments are keys and values, each in marks. What a schema does not call a string is read as JSON."""

    ends = ">"

    def __init__(self, form: CallFormat, tools: Sequence[Tool]) -> None:
        of_call = _shared_begin(form.closing, form.between or form.closing)
        of_turn = form.closing[len(of_call) :]
        super().__init__(form, of_turn, (form.between or "")[len(of_call) :])
        self._properties = {tool.name: tool.parameters.get("properties", {}) for tool in tools}
        marks = {"middle": form.middle, "key": form.pairs.key, "next": form.pairs.next, "end": of_call}
        if form.pairs.none is not None:
            marks["none"] = form.pairs.none.removesuffix(of_turn)
        self._marks = {name: re.compile(_flexible(mark)) for name, mark in marks.items()}

    def _arguments(self, text: str, begin: int, name: str) -> tuple[dict[str, Any], int] | None:
        if (at := self._marks["middle"].match(text, begin)) is None:
            none = self._marks["none"].match(text, begin) if "none" in self._marks else None
            return None if none is None else ({}, none.end())
        arguments: dict[str, Any] = {}
        while True:
            key = self._marks["key"].search(text, at.end())
            if key is None:
                return None
            ends = (self._marks[which].search(text, key.end()) for which in ("next", "end"))
            found = min((end for end in ends if end is not None), key=re.Match.start, default=None)
            if found is None:
                return None
            word = text[at.end() : key.start()].strip()
            arguments[word] = self._value(name, word, text[key.end() : found.start()])
            if found.re is self._marks["end"]:
                return arguments, found.end()
            at = found

    def _value(self, name: str, key: str, text: str) -> Any:
        described = self._properties.get(name, {}).get(key, {})
        if isinstance(described, Mapping) and described.get("type") == "string":
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


def _shared_begin(one: str, other: str) -> str:
    """What two texts begin with, up to the end of its last mark."""
    same = next(
        (i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    return one[: one.rindex(">", 0, same) + 1] if ">" in one[:same] else one[:same]
