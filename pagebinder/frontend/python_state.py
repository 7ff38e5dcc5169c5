"""Numbers that a model keeps in Python and changes while it runs: a graph would keep one value of each for ever.

    self.calls += 1;  return logits if self.calls % 2 else -logits        self.seen.append(ids)

torch.export looks at tensors alone, and puts back what modules hold. So what they hold is compared before and after
the model's forward, while it is traced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from pagebinder.errors import CaptureError

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
MOST_ELEMENTS = 64  # of a list that are looked at, besides their number
MOST_NAMED = 3


@contextlib.contextmanager
def refused_python_state(model: torch.nn.Module, wrapper: torch.nn.Module) -> Iterator[None]:
    """While it is open, `wrapper`, which calls `model`, is watched; its forward is its own again afterwards.

    Raises:
        CaptureError: at the end of the block, if a call of forward changed attributes of `model` or its parts: names
            them with both values.
    """
    changed: list[tuple[str, str, str, str]] = []
    forward = wrapper.forward

    @functools.wraps(forward)
    def watched(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return forward(*args, **kwargs)
        before = _attributes(model)
        out = forward(*args, **kwargs)
        changed[:] = _changes(model, before, _attributes(model))
        return out

    wrapper.forward = watched
    try:
        yield
    finally:
        del wrapper.forward
    if changed:
        names = "; ".join(
            f"{path + '.' if path else ''}{name} ({was} -> {now})"
            for path, name, was, now in changed[:MOST_NAMED]
        )
        more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        raise CaptureError(
            f"{type(model).__name__} changes attributes in Python while it runs: {names}{more}. What it computes may "
            "depend on how often it ran, and a graph would keep one value for ever. Leave them alone in forward, or "
            "change them outside of it."
        )


_MISSING = object()


def _attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Of each module by its path: what its attributes look like. Those that are not compared are left out."""
    return {
        path: {
            name: look
            for name, value in vars(module).items()
            if name not in _OF_TORCH and (look := _look(value)) is not _MISSING
        }
        for path, module in model.named_modules()
    }


_OF_TORCH = frozenset(vars(torch.nn.Module()))


def _look(value: Any, inside: bool = False) -> Any:
    """Equal for what is as it was. _MISSING: nothing is known of it."""
    if isinstance(value, PLAIN):
        return value if value == value else "nan"
    if isinstance(value, (list, tuple, set, frozenset, dict)) and not inside:
        elements = list(value.items() if isinstance(value, dict) else value)[:MOST_ELEMENTS]
        flat = [x for e in elements for x in (e if isinstance(value, dict) else [e])]
        looks = [_look(x, inside=True) for x in flat]
        return type(value).__name__, len(value), [x for x in looks if x is not _MISSING]
    return _MISSING


def _changes(model: torch.nn.Module, before: dict, after: dict) -> list[tuple[str, str, str, str]]:
    """(path of a module, attribute, what it was, what it is). New ones that the class does not have either are left
    out: nothing has read them."""
    changed = []
    for path in before.keys() & after.keys():
        was, now, kind = before[path], after[path], type(model.get_submodule(path))
        for name in was.keys() | now.keys():
            old = was[name] if name in was else _look(getattr(kind, name, torch))
            new = now.get(name, _MISSING)
            if old is not _MISSING and (type(old) is not type(new) or old != new):
                changed.append((path, name, _text(old), _text(new)))
    return sorted(changed)


def _text(look: Any) -> str:
    if look is _MISSING:
        return "something else"
    if isinstance(look, tuple):
        return f"{look[0]} of {look[1]}"
    return repr(look)
