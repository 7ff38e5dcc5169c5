"""What a text must look like: `SamplingParams(guide=...)`.

JsonSchema   JSON that a schema admits
Regex        all of the text matches a regular expression
Choice       one of several texts
Grammar      a context-free grammar, in Lark's or llama.cpp's (GBNF) notation

Every token is chosen among those with which the text can still become such a text; its end comes when it is one and
nothing more may follow, or when the model ends it. `max_tokens` cuts it all the same. These here only say what is
wanted; llguidance (extra `pagebinder[guide]`) knows what they mean. Tokens spell the wanted text exactly; decoders of
some tokenizers (Llama 2) drop a blank at the beginning of a text, of this one, too.

A function of your own is a guide, too: the tokens generated so far (list of ids) -> what may come next: token ids, a
mask [V] of bools, or None for anything. No token: the text ends there. It is asked once for each state, and must
answer the same when it is asked again. It may abort requests of the engine, its own, too: they end with the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagebinder.config_checks import check_unicode, short_repr
from pagebinder.errors import RequestError

MOST_CHARS = 1 << 20  # of a guide
SHOWN_CHARS = 60  # of what is none, in a message
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class JsonSchema:
    """`schema`: a dict, its JSON text, or a class with `model_json_schema()` (pydantic); any object by default.
    Keys come in the order of the schema's properties; between two parts there is a blank at most, or a line's end and
    an indent; `compact`: nothing.

    Raises RequestError: it is none of these.
    """

    schema: Any = None
    compact: bool = False

    def __post_init__(self) -> None:
        schema = ANY_OBJECT if self.schema is None else self.schema
        if callable(getattr(schema, "model_json_schema", None)):
            schema = schema.model_json_schema()
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"The guide's JSON schema is no JSON: {error}") from error
        if not isinstance(schema, Mapping):
            raise RequestError(
                f"A JSON schema is an object, as {json.dumps(ANY_OBJECT)}, not {short_repr(schema, SHOWN_CHARS)}."
            )
        if not isinstance(self.compact, bool):
            raise RequestError(f"compact={self.compact!r}: use True or False.")
        object.__setattr__(self, "schema", _checked(text, "JSON schema"))


@dataclass(frozen=True)
class Regex:
    """`pattern`: the syntax of Rust's regex crate, without look-around and back references; all of the text matches.

    Raises RequestError: it is no text.
    """

    pattern: str

    def __post_init__(self) -> None:
        _checked(self.pattern, "regular expression")


@dataclass(frozen=True)
class Choice:
    """`options`: texts, at least one of them.

    Raises RequestError: it is anything else.
    """

    options: Sequence[str]

    def __post_init__(self) -> None:
        options = self.options
        if (
            not isinstance(options, (list, tuple))
            or not options
            or not all(isinstance(o, str) for o in options)
        ):
            raise RequestError(
                f"A guide's choices are a list of texts, not {short_repr(options, SHOWN_CHARS)}."
            )
        if not all(options):
            raise RequestError("A guide's choices must not be empty texts.")
        _checked("".join(options), "choices")
        object.__setattr__(self, "options", tuple(options))


@dataclass(frozen=True)
class Grammar:
    """`text`: a grammar that begins with the rule `start` (Lark) or `root` (GBNF).

    Raises RequestError: it is no text.
    """

    text: str

    def __post_init__(self) -> None:
        _checked(self.text, "grammar")


GUIDES = (JsonSchema, Regex, Choice, Grammar)


def _checked(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"A guide's {name} is a text, not {short_repr(text, SHOWN_CHARS)}.")
    check_unicode(text, f"guide's {name}")
    if len(text) > MOST_CHARS:
        raise RequestError(f"The guide's {name} has {len(text):,} characters: use {MOST_CHARS:,} at most.")
    return text
