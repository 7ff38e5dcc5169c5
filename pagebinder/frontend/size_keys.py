"""A dict that a trace fills by the number of tokens (`self.cache[T] = table`): Python cannot hash a traced number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

SIZES = (torch.SymInt, torch.SymFloat)


class KeyMayBeThere(RuntimeError):
    """It cannot be told for all numbers of tokens whether a dict has a key."""


@dataclass(frozen=True)
class SizeKey:
    """A traced number among the keys of a `SizeKeys`, or part of a tuple that is one."""

    expression: Any


class SizeKeys(dict):
    """Keeps traced numbers under their expressions.

    Raises:
        KeyMayBeThere: it is asked for a key that is none of its own, and would be one for some numbers of tokens.
    """

    def __contains__(self, key) -> bool:
        return super().__contains__(self._by_expression(key))

    def __getitem__(self, key):
        return super().__getitem__(self._by_expression(key))

    def __setitem__(self, key, value) -> None:
        super().__setitem__(self._by_expression(key), value)

    def __delitem__(self, key) -> None:
        super().__delitem__(self._by_expression(key))

    def get(self, key, default=None):
        return super().get(self._by_expression(key), default)

    def setdefault(self, key, default=None):
        return super().setdefault(self._by_expression(key), default)

    def pop(self, key, *default):
        return super().pop(self._by_expression(key), *default)

    def _by_expression(self, key):
        key = _by_expression(key)
        for other in self:
            if key != other and _may_be_equal(key, other):
                raise KeyMayBeThere(f"{key} may be {other}")
        return key


def _by_expression(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(_by_expression, key))
    return SizeKey(key.node.expr) if isinstance(key, SIZES) else key


def _may_be_equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_may_be_equal, a, b))
    if isinstance(a, SizeKey) or isinstance(b, SizeKey):
        return all(isinstance(x, (SizeKey, int, float)) for x in (a, b))
    return a == b


def differ_in_numbers(a: Any, b: Any) -> bool:
    """Two keys, of which numbers alone are not the same."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(x == y or differ_in_numbers(x, y) for x, y in zip(a, b))
    return type(a) is int and type(b) is int
