"""What configs check their options with: unknown keys, dtypes by name, numbers."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pagebinder.errors import ConfigError, RequestError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_BITS = 14_000  # of a number: Python writes 4,300 digits at most, in messages too


def strict(error: type[Exception]) -> Callable[[type], type]:
    """Class decorator: an unknown keyword raises `error` and suggests the nearest option; numbers and arrays of numpy
    become Python's."""

    def decorate(cls: type) -> type:
        original = cls.__init__
        names = [f.name for f in dataclasses.fields(cls)]

        @functools.wraps(original)
        def init(self, *args, **kwargs):
            if args:
                raise error(f"{cls.__name__} takes keyword arguments only, for example {names[0]}=...")
            for key in kwargs:
                if key not in names:
                    near = difflib.get_close_matches(key, names, n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else "."
                    raise error(f"{cls.__name__} has no option {key!r}{hint} Options: {', '.join(names)}.")
            values = {key: plain_value(value) for key, value in kwargs.items()}
            for key, value in values.items():
                if is_int(value) and value.bit_length() > MOST_BITS:
                    raise error(f"{key} is a number of {value.bit_length():,} bits: nothing takes such.")
            original(self, **values)

        cls.__init__ = init
        return cls

    return decorate


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """ "bfloat16", "torch.bfloat16" or torch.bfloat16 -> torch.bfloat16; None stays None."""
    if dtype is None or dtype in DTYPES.values():
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def require(condition: bool, error: type[Exception], message: str) -> None:
    if not condition:
        raise error(message)


def is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value) -> bool:
    """A number that a float can hold."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def plain_number(value: Any) -> Any:
    """A number of numpy as Python's; anything else as it is."""
    return value.item() if isinstance(value, np.number) else value


def plain_value(value: Any) -> Any:
    """A number, an array or a collection of them, with Python's numbers; anything else as it is."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.tolist()
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(plain_number, value))
    return plain_number(value)


def short_repr(value: object, most: int = 80) -> str:
    """A value for a message, `most` characters of it."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write numbers of so many digits
        return f"{type(value).__name__} of too many digits"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def check_unicode(text: str, name: str) -> None:
    """Raises RequestError: `text` cannot be encoded, so neither tokenised nor hashed."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The {name} is no Unicode text: character {error.start} is half of a surrogate pair."
        ) from error
