"""What a model's modules hold, place by place, so that two states of it can be compared and one can be emptied.

    layers.0.rotary.seq_len_cached      an attribute            its value
    layers.0.mask (a buffer)            a buffer                its tensor
    layers.0.rotary.cache["cos"]        an entry of a dict      its value, whatever the depth
    layers.0.rotary.held[1]             part of a list          compared as one value with the list

Of objects that modules hold, attributes are places. Others are the same only if they are the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pagebinder.frontend.python_state import MISSING, OF_TORCH, PLAIN, holds, is_object, look
from pagebinder.frontend.size_keys import SIZES

MOST_NESTED = 4  # lists in lists
Path = tuple[Hashable, ...]  # that of a module, "buffer" for those of one, names and keys


class NotAMemo(Exception):
    """It is not proven to be one."""


@dataclass(frozen=True)
class Place:
    """`holder[key]`, and what it is as `shown` has it. `is_entry`: of a dict; else an attribute or buffer."""

    holder: dict
    key: Hashable
    value: Any
    is_entry: bool


def state_of(model: torch.nn.Module) -> dict[Path, Place]:
    """All places of the modules and of the objects and dicts that they hold; of one that has several, the first."""
    places = {}
    for path, holder, keys, is_dict in holders(model):
        for key in keys:
            value = holder[key]
            if _held_by(value, len(path) == 1) is None:
                places[*path, key] = Place(holder, key, shown(value), is_dict)
    return places


def holders(model: torch.nn.Module) -> Iterator[tuple[Path, dict, list, bool]]:
    """(path, dict, keys, is it one of the model's?) of all that has places."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        own = [name for name in vars(module) if name not in OF_TORCH]
        yield from _holders((path,), vars(module), own, False, seen)
        yield from _holders((path, "buffer"), module._buffers, list(module._buffers), False, seen)


def _holders(
    path: Path, holder: dict, keys: list, is_dict: bool, seen: set[int]
) -> Iterator[tuple[Path, dict, list, bool]]:
    yield path, holder, keys, is_dict
    for key in keys:
        inner = _held_by(holder[key], len(path) == 1)
        if inner is not None and id(inner) not in seen:
            seen.add(id(inner))
            yield from _holders((*path, key), inner, list(inner), inner is holder[key], seen)


def _held_by(value: Any, is_attribute: bool) -> dict | None:
    """The entries of a dict; the attributes of an object, if a module holds it: others may be anything (loggers)."""
    if isinstance(value, dict) and holds(value):
        return value
    return vars(value) if is_attribute and is_object(value) and not isinstance(value, SIZES) else None


def shown(value: Any, depth: int = MOST_NESTED) -> Any:
    """Stays what it is when a list or an array that it shows changes: of those (class, *elements)."""
    if isinstance(value, (list, tuple)) and depth and holds(value):
        return type(value), *(shown(v, depth - 1) for v in value)
    if isinstance(value, (torch.Tensor, *PLAIN, *SIZES)):
        return value
    looks = look(value)
    return value if looks is MISSING else looks


def equal(a: Any, b: Any, same_tensors: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
    """Of two `shown` values."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, SIZES):
        return False
    if isinstance(a, torch.Tensor):
        return same_tensors(a, b)
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(equal(x, y, same_tensors) for x, y in zip(a, b))
    return isinstance(a, (*PLAIN, bytes)) and bool(a == b)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Neither is it the same if there is a NaN."""
    return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and torch.equal(a, b)


def changed(before: dict[Path, Place], after: dict[Path, Place]) -> dict[Path, Any]:
    """New values (MISSING: it is gone) of the places that have others. Another tensor is another value."""
    values = {path: (value_at(before, path), value_at(after, path)) for path in before | after}
    return {path: now for path, (was, now) in values.items() if not equal(was, now, lambda a, b: False)}


def value_at(state: dict[Path, Place], path: Path) -> Any:
    return state[path].value if path in state else MISSING


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Those in a `shown` value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list):
        for v in value:
            yield from tensors_of(v)


def put(model: torch.nn.Module, values: dict[Path, Any]) -> None:
    """Let places hold these values; MISSING: none."""
    state = state_of(model)
    for path, value in values.items():
        if path not in state and value is MISSING:
            continue
        if path not in state and len(path) != 2:
            raise NotAMemo(path)
        of_module = vars(model.get_submodule(path[0]))
        holder, key = (state[path].holder, state[path].key) if path in state else (of_module, path[1])
        holder.pop(key, None)
        if value is not MISSING:
            holder[key] = value


def empty(value: Any, zeros: bool, of_tensor) -> Any:
    """A new value in the place of one that is `shown`."""
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, tuple) and value and value[0] in (list, tuple):
        return value[0](empty(v, zeros, of_tensor) for v in value[1:])
    if isinstance(value, tuple) or callable(value):
        raise NotAMemo(f"{value} cannot be emptied")
    return type(value)() if zeros and isinstance(value, (bool, int, float)) else None
