"""What a model keeps in Python and changes while it runs: a graph would keep one value of each for ever.

    self.calls += 1;  return logits if self.calls % 2 else -logits        refused
    self.seen.append(ids)                                                 refused
    self.attention = DenseAttention(...) if length < 1024                 refused (BigBird)
    self.longest = max(self.longest, 1)                                   the same from the second call on: served

torch.export looks at tensors alone, and puts back plain values. So what modules hold is compared before and after the
model's forward, while it is traced. Where that changes, the model is traced once more as its first call left it:
it is served if nothing changes any more and the graph is the same.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from pagebinder.errors import CaptureError

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
MOST_ELEMENTS = 64  # of a list that are looked at, besides their number
MOST_NAMED = 3


@dataclass(frozen=True)
class Change:
    """An attribute or submodule of the module at `path` that became another one. Values are as `_look` has them."""

    path: str
    name: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path + '.' if self.path else ''}{self.name} ({_text(self.was)} -> {_text(self.now)})"


def traced_in_steady_state(
    model: torch.nn.Module, wrapper: torch.nn.Module, trace: Callable[[], ExportedProgram]
) -> ExportedProgram:
    """What `trace` returns, which traces `wrapper`, and that calls `model`.

    Raises:
        CaptureError: a call of forward changes attributes of `model` or its parts, and that does not end after the
            first one, or changes the graph. Names them with both values.
    """
    program, changes = _watched(model, wrapper, trace)
    if not changes:
        return program
    with contextlib.ExitStack() as undo:
        if all(isinstance(c.now, PLAIN) for c in changes):
            for change in changes:
                undo.enter_context(_set(model.get_submodule(change.path), change.name, change.now))
            again, more = _watched(model, wrapper, trace)
            if not more and str(again.graph) == str(program.graph):
                return program
    raise _refused(model, changes)


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """What runs meanwhile may not change the model; plain values and submodules are as before afterwards.

    Raises:
        CaptureError: an attribute or a submodule is another one.
    """
    with _put_back(model) as changes:
        yield
    if changes:
        raise _refused(model, changes)


@contextlib.contextmanager
def _put_back(model: torch.nn.Module) -> Iterator[list[Change]]:
    """Undoes at the end what changed meanwhile, where it is a plain value or a submodule; a list of it all then."""
    before, changes = _attributes(model), []
    try:
        yield changes
    finally:
        changes += _changes(model, before, _attributes(model))
        for change in changes:
            if isinstance(change.was, (*PLAIN, torch.nn.Module)):
                setattr(model.get_submodule(change.path), change.name, change.was)


def _refused(model: torch.nn.Module, changes: list[Change]) -> CaptureError:
    names = "; ".join(map(str, changes[:MOST_NAMED]))
    more = f" and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else ""
    return CaptureError(
        f"{type(model).__name__} changes attributes in Python while it runs: {names}{more}. What it computes may "
        "depend on how often it ran and on what it was given before, and a graph would keep one value for ever. "
        "Leave them alone in forward, or change them outside of it."
    )


def _watched(
    model: torch.nn.Module, wrapper: torch.nn.Module, trace: Callable[[], ExportedProgram]
) -> tuple[ExportedProgram, list[Change]]:
    """What `trace` returns, and what a call of the model changed meanwhile."""
    changes: list[Change] = []
    forward = wrapper.forward

    @functools.wraps(forward)
    def watched(*args, **kwargs):
        before = _attributes(model)
        out = forward(*args, **kwargs)
        changes[:] = _changes(model, before, _attributes(model))
        return out

    with _put_back(model), _set(wrapper, "forward", watched):
        return trace(), changes


@contextlib.contextmanager
def _set(module: torch.nn.Module, name: str, value: Any) -> Iterator[None]:
    """An attribute of the module itself, which hides one of its class."""
    own = vars(module)
    was = own.get(name, _MISSING)
    own[name] = value
    try:
        yield
    finally:
        if was is _MISSING:
            own.pop(name, None)
        else:
            own[name] = was


_MISSING = object()


def _attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Of each module by its path: what its attributes look like. Those that are not compared are left out."""
    return {
        path: {
            name: look
            for name, value in (vars(module) | module._modules).items()
            if name not in _OF_TORCH and (look := _look(value)) is not _MISSING
        }
        for path, module in model.named_modules()
    }


_OF_TORCH = frozenset(vars(torch.nn.Module()))


def _look(value: Any, inside: bool = False) -> Any:
    """Equal for what is as it was. _MISSING: nothing is known of it."""
    if isinstance(value, (*PLAIN, torch.nn.Module)):
        return value if value == value else math.nan  # one object, as no two are equal
    if isinstance(value, (list, tuple, set, frozenset, dict)) and not inside:
        elements = list(value.items() if isinstance(value, dict) else value)[:MOST_ELEMENTS]
        flat = [x for e in elements for x in (e if isinstance(value, dict) else [e])]
        looks = [_look(x, inside=True) for x in flat]
        return type(value).__name__, len(value), [x for x in looks if x is not _MISSING]
    return _MISSING


def _changes(model: torch.nn.Module, before: dict, after: dict) -> list[Change]:
    """New ones that the class does not have either are left out: nothing has read them."""
    changes = []
    for path in sorted(before.keys() & after.keys()):
        was, now, kind = before[path], after[path], type(model.get_submodule(path))
        for name in sorted(was.keys() | now.keys()):
            old = was[name] if name in was else _look(getattr(kind, name, torch))
            new = now.get(name, _MISSING)
            if old is not _MISSING and old is not new and (type(old) is not type(new) or old != new):
                changes.append(Change(path, name, old, new))
    return changes


def _text(look: Any) -> str:
    if look is _MISSING:
        return "something else"
    if isinstance(look, tuple):
        return f"{look[0]} of {look[1]}"
    if isinstance(look, torch.nn.Module):
        return type(look).__name__
    return repr(look)
