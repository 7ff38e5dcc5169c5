"""Calls of tools in what a model writes, in the format of its chat template (tool_formats.py).

    I look it up. <tool_call> {"name": "f", "arguments": {"x": 1}} </tool_call>
    content       |mark       JSON value                           dropped

Text is shown as soon as it cannot be the beginning of a mark, a call when its arguments are complete. What begins
like a call and is none stays text: nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagebinder.server.tool_call_kinds import Call, Tool, before_id, calls_of
from pagebinder.server.tool_formats import CallFormat

At = Callable[
    [str, int], tuple[list[Call], int] | None
]  # (text, where) -> the calls that begin there, their end


@dataclass(frozen=True)
class News:
    """What a reader has found since the last time."""

    content: str
    calls: list[Call]


class CallReader:
    """Reads one answer, piece by piece, of a model that was shown `tools`. `several`: False passes over all calls but
    the first."""

    def __init__(self, form: CallFormat, tools: Sequence[Tool], *, several: bool = True) -> None:
        self._calls, self._several = calls_of(form, tools), several
        self._mark = before_id(form.mark).split(maxsplit=1)[0] if form.mark else ""
        self._text = ""
        self._at = 0  # all before it was told
        self._solid = 0  # behind the last character that is no white space
        self._tried = 0  # how long the text was when a call was looked for
        self._is_text = False  # to its end, as calls would be all there is
        self._behind_call = False
        self.num_calls = 0

    def read(self, text: str, *, finished: bool) -> News:
        """text: what came since the last time."""
        if solid := text.rstrip():
            self._solid = len(self._text) + len(solid)
        self._text += text
        content: list[str] = []
        calls: list[Call] = []
        while self._at < len(self._text):
            if self._behind_call:
                if not self._go_on(calls, finished):
                    break
                continue
            begin, mark = self._find_mark()
            content.append(self._text[self._at : begin])
            self._at = begin
            if mark is None:
                break
            if self._take(self._calls.first, mark, calls, finished):
                continue
            if not finished and self._calls.may_begin(self._text, mark):
                break
            self._at = mark + max(len(self._mark), 1)  # it is none
            content.append(self._text[begin : self._at])
            self._is_text = not self._mark
        calls = calls if self._several else calls[: max(0, 1 - self.num_calls)]
        self.num_calls += len(calls)
        if finished:
            rest = self._text[self._at :]
            closes = self._behind_call and self._calls.end.startswith(rest.strip())
            content.append("" if closes or (self.num_calls and not rest.strip()) else rest)
            self._at = len(self._text)
        return News("".join(content), calls)

    def _find_mark(self) -> tuple[int, int | None]:
        """(where what may be a call begins, with the white space before it; where its mark is, once that is whole)"""
        text, mark = self._text, None
        if not self._mark:
            first = text[self._at : self._at + 200].lstrip()[:1]
            self._is_text |= bool(first) and first not in "{["
            return (len(text), None) if self._is_text else (self._at, self._at if first else None)
        found = text.find(self._mark, self._at)
        if found >= 0:
            mark = found
            while found > self._at and text[found - 1].isspace():
                found -= 1
            return found, mark
        most = min(len(self._mark), len(text) - self._at)
        begun = next((n for n in range(most, 0, -1) if text.endswith(self._mark[:n])), 0)
        found = len(text) - begun
        if begun:
            return self._at + len(text[self._at : found].rstrip()), None
        return max(self._at, self._solid), None

    def _take(self, at: At, begin: int, calls: list[Call], finished: bool) -> bool:
        """Pass the calls that begin there. False: there is none, or it is not whole yet."""
        if not finished and not any(
            self._text.find(stop, max(begin, self._tried - len(stop))) >= 0 for stop in self._calls.stops
        ):
            return False
        found = at(self._text, begin)
        self._tried = len(self._text) if found is None else found[1]
        if found is None:
            return False
        calls += found[0]
        self._at, self._behind_call = found[1], True
        return True

    def _go_on(self, calls: list[Call], finished: bool) -> bool:
        """Pass the next call or what closes the last one. False: it may still be coming."""
        rest = self._text[self._at :].lstrip()
        parts = [before_id(part) for part in (self._calls.between, self._calls.end, *self._calls.separators)]
        if not finished and (not rest or any(part.startswith(rest.rstrip()) for part in parts if part)):
            return False
        if finished and any(part.startswith(rest.rstrip()) for part in parts if part):  # cut within it
            self._at = len(self._text)
        elif self._calls.has_next(self._text, self._at):
            if self._take(self._calls.next, self._at, calls, finished):
                return True
            if not finished:
                return False
        elif (end := self._calls.closes(self._text, self._at)) is not None:
            self._at = end
        self._behind_call = False
        return True
