"""What a model keeps in Python and changes while it runs: a graph would keep one value of each for ever.

    self.calls += 1;  return logits if self.calls % 2 else -logits        refused
    self.seen.append(ids), self.table["n"][0] += 1                        refused, NumPy's arrays and deques, too
    self.attention = DenseAttention(...) if length < 1024                 refused (BigBird)
    self.longest = max(self.longest, 1)                                   the same from the second call on: served

torch.export does not look at such values. So what modules hold, objects that they hold included, is compared before
and after the model's forward, while it is traced, and put back. Where it changed, the model is traced once more as
its first call left it: it is served if nothing changes any more and the graph is the same.

Of tensors those count that are made of a call's tokens or positions (`self.last = x`) and that calls read; a table
that the first call makes is part of the graph. What lives outside of modules (globals, iterators) is not seen.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from pagebinder.errors import CaptureError
from pagebinder.frontend.own_code import functions_of
from pagebinder.frontend.traced_values import nodes_behind
from pagebinder.graph_tools import storage_of

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, np.generic)
CONTAINERS = (list, tuple, set, frozenset, dict, deque)
MOST_ELEMENTS = 64  # of a list that are looked at, besides their number
MOST_INSIDE = 4096  # of what an attribute holds at all depths
MOST_BYTES, SAMPLED = 1 << 20, 4096  # of a larger array so many values are compared, and it is not put back
MOST_NAMED = 3


@dataclass(frozen=True)
class Change:
    """An attribute or submodule of the module at `path` that became another one. Values are as `look` has them."""

    path: str
    name: str  # "a.b": b of an object
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path + '.' if self.path else ''}{self.name} ({_difference(self.was, self.now)})"


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
        if all(isinstance(c.now, (*PLAIN, torch.Tensor)) for c in changes):
            zeros = []
            for change in changes:
                now = change.now
                if isinstance(now, torch.Tensor):
                    zeros.append(now := _zeros(now))
                undo.enter_context(set_attribute(*_holder(model, change), now))
            again, more = _watched(model, wrapper, trace)
            written = {(c.path, c.name) for c in changes if isinstance(c.now, torch.Tensor)}
            settled = all((c.path, c.name) in written for c in more) and not _reads(again, zeros)
            if settled and str(again.graph) == str(program.graph):
                return program
    raise refused_changes(model, changes)


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """What runs meanwhile may not change the model, which is as before afterwards.

    Raises:
        CaptureError: an attribute or a submodule became another one.
    """
    before = _attributes(model)
    with put_back(model):
        yield
        changes = _changes(model, before, _attributes(model))
    if changes:
        raise refused_changes(model, changes)


@contextlib.contextmanager
def put_back(model: torch.nn.Module) -> Iterator[None]:
    """Undoes at the end what happens to attributes, submodules and buffers, and to containers and objects in them.

    What is written in place into a buffer, or an attribute that is a tensor, is undone, too, up to MOST_BYTES.
    Lists and dicts that hooks and functions of modules close over (`activations.append(out)`) are put back, too.
    Where parameters were written in place, nothing is: attributes may say that this is done (`layers_are_rescaled`
    of RWKV).
    """
    written = [(p, p._version) for p in model.parameters() if not p.is_inference()]
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]  # its state is in C++
    holders = [vars(m) for m in modules] + [h for m in modules for h in (m._modules, m._buffers)]
    attributes = [value for m in modules for name, value in vars(m).items() if name not in OF_TORCH]
    objects = {id(value): vars(value) for value in attributes if is_object(value)}.values()
    attributes += [value for held in objects for value in held.values()]
    holders += [*objects, *_changeable([*attributes, *_closed_over(modules)])]
    copies = [copy.copy(holder) for holder in holders]
    contents = _contents([t for m in modules for t in (*m._buffers.values(), *vars(m).values())])
    try:
        yield
    finally:
        if all(p._version == version for p, version in written):
            for holder, before in zip(holders, copies):
                _restore(holder, before)
            for tensor, version, content in contents:
                if tensor._version != version:
                    with torch.no_grad():
                        tensor.copy_(content)


def _contents(values: Iterable[Any]) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    """Of the tensors that are put back: each once, with its version and a copy."""
    tensors = {
        id(t): t
        for t in values
        if type(t) is torch.Tensor
        and t.layout is torch.strided
        and not (t.is_meta or t.is_inference() or t.requires_grad)
        and t.nbytes <= MOST_BYTES
    }
    return [(t, t._version, t.detach().clone()) for t in tensors.values()]


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """eval() for the duration, each submodule put back as it was."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


def _closed_over(modules: list[torch.nn.Module]) -> list:
    """Each container or array in a closure of a hook, or of a function that a module has as an attribute, once."""
    functions = [f for m in modules for f in functions_of(m)]
    functions = [getattr(f, "func", getattr(f, "__func__", f)) for f in functions]  # of partials and methods
    cells = [cell for f in functions for cell in getattr(f, "__closure__", None) or ()]
    contents = [cell.cell_contents for cell in cells if _is_filled(cell)]
    return list({id(value): value for value in contents if holds(value)}.values())


def _is_filled(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _changeable(values: Iterable[Any]) -> list:
    """The containers and arrays among values and in them, each once."""
    inside = {id(x): x for value in values if holds(value) for x in _inside(value)}.values()
    return [
        x
        for x in inside
        if holds(x) and (x.nbytes <= MOST_BYTES if _is_array(x) else not isinstance(x, (tuple, frozenset)))
    ]


def _restore(holder: Any, before: Any) -> None:
    if _is_array(holder):
        if holder.shape == before.shape and holder.tobytes() != before.tobytes():
            holder[...] = before
        return
    if isinstance(holder, dict):
        same = holder.keys() == before.keys() and all(holder[k] is before[k] for k in before)
    elif isinstance(holder, set):  # a copy has another order
        same = holder == before
    else:
        same = len(holder) == len(before) and all(map(operator.is_, holder, before))
    if same:
        return
    holder.clear()
    (holder.extend if isinstance(holder, (list, deque)) else holder.update)(before)


def refused_changes(model: torch.nn.Module, changes: list[Change]) -> CaptureError:
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
        changes[:] = [c for c in _changes(model, before, _attributes(model)) if not _is_table(c.now)]
        return out

    with put_back(model), set_attribute(wrapper, "forward", watched):
        return trace(), changes


def _reads(program: ExportedProgram, tensors: list[torch.Tensor]) -> bool:
    """Is one of them a constant of the program?"""
    storages = {t.untyped_storage()._cdata for t in tensors}
    constants = [c for c in program.constants.values() if isinstance(c, torch.Tensor)]
    return any(c.untyped_storage()._cdata in storages for c in constants)


def _zeros(traced: torch.Tensor) -> torch.Tensor:
    """A tensor with values in the place of one of a trace."""
    shape = [s.node.hint if isinstance(s, torch.SymInt) else s for s in traced.shape]
    return torch.zeros(shape, dtype=traced.dtype, device=traced.device)


def _is_table(value: Any) -> bool:
    """A tensor that the traced call made, but not of what it was given."""
    behind = nodes_behind(value) if isinstance(value, torch.Tensor) else None
    return behind is not None and all(node.op != "placeholder" for node in behind)


@contextlib.contextmanager
def set_attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of the module or object itself, which hides one of its class."""
    own = vars(holder)
    was = own.get(name, MISSING)
    own[name] = value
    try:
        yield
    finally:
        if was is MISSING:
            own.pop(name, None)
        else:
            own[name] = was


def _holder(model: torch.nn.Module, change: Change) -> tuple[Any, str]:
    """What has the attribute, a module or an object that it holds, and its name there."""
    *objects, name = change.name.split(".")
    return functools.reduce(getattr, objects, model.get_submodule(change.path)), name


MISSING = object()


def _attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Of each module by its path: what its attributes look like. Those that are not compared are left out."""
    attributes, seen = {}, set()
    for path, module in model.named_modules():
        looks = attributes[path] = {}
        for name, value in _held_by(module).items():
            values = {} if name in OF_TORCH else {name: value}
            if is_object(value):
                values = {} if id(value) in seen else {f"{name}.{k}": v for k, v in vars(value).items()}
                seen.add(id(value))
            looks |= {k: seen_as for k, v in values.items() if (seen_as := look(v)) is not MISSING}
    return attributes


def _held_by(module: torch.nn.Module) -> dict[str, Any]:
    """Attributes and submodules; TorchScript keeps its own in C++."""
    of_script = getattr(getattr(module, "_concrete_type", None), "get_attributes", dict)()
    return vars(module) | dict(module._modules.items()) | {name: getattr(module, name) for name in of_script}


OF_TORCH = frozenset(vars(torch.nn.Module()))


def is_object(value: Any) -> bool:
    """Does it hold attributes, and is it no part of the model, nor code?"""
    return hasattr(value, "__dict__") and not (
        callable(value) or isinstance(value, (*PLAIN, torch.nn.Module, torch.Tensor)) or holds(value)
    )


def look(value: Any) -> Any:
    """The same for what is as it was. MISSING: nothing is known of it."""
    if isinstance(value, (*PLAIN, torch.nn.Module, torch.Tensor)):
        return value
    if not holds(value):
        return MISSING
    return (
        type(value).__name__,
        np.size(value) if _is_array(value) else len(value),
        [*_looks_inside(value)],
    )


def _looks_inside(value: Any) -> Iterator[Any]:
    """Of what a container holds; tensors are left out."""
    for held in _inside(value):
        if _is_array(held):
            yield held.shape, _bytes(held)
        elif holds(held):
            yield type(held), len(held)
        elif isinstance(held, (*PLAIN, torch.nn.Module)):
            yield held.item() if isinstance(held, np.generic) else held


def _bytes(array: np.ndarray) -> bytes:
    """Of its values, or of a sample of many; none of objects, which `_inside` gives one by one."""
    if array.dtype.hasobject:
        return b""
    step = 1 if array.nbytes <= MOST_BYTES else max(array.size // SAMPLED, 1)
    return array.flat[::step].tobytes()


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def holds(value: Any) -> bool:
    """Is it a container or array that can be looked into? Not one whose class iterates by code of its own."""
    if not isinstance(value, CONTAINERS):
        return _is_array(value)
    kind = type(value)
    own_items = isinstance(value, dict) and kind.items not in (dict.items, OrderedDict.items)
    return not own_items and kind.__iter__ in _ITERATIONS and kind.__len__ in _LENGTHS


_ITERATIONS = {kind.__iter__ for kind in (*CONTAINERS, OrderedDict)}
_LENGTHS = {kind.__len__ for kind in (*CONTAINERS, OrderedDict)}


def _inside(value: Any) -> Iterator[Any]:
    """A container or array, and what is in it at any depth, the outer ones first."""
    found, seen = [value], {id(value)}
    for held in found:  # which grows
        yield held
        for element in _elements(held) if len(found) < MOST_INSIDE else ():
            if not holds(element) or id(element) not in seen:
                found.append(element)
                seen.add(id(element))


def _elements(value: Any) -> Iterable[Any]:
    """The first ones of a container; of an array those that are objects."""
    if _is_array(value):
        return value.flat[:MOST_ELEMENTS].tolist() if value.dtype.hasobject else ()
    if not holds(value):
        return ()
    elements = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    if not isinstance(value, dict):
        return itertools.islice(elements, MOST_ELEMENTS)
    return itertools.chain.from_iterable(itertools.islice(value.items(), MOST_ELEMENTS))


def _is_same(was: Any, now: Any) -> bool:
    if was is now:
        return True
    if isinstance(was, torch.Tensor) and isinstance(now, torch.Tensor):
        return _is_same_memory(was, now)  # self.cache = self.cache.to(x)
    if type(was) is not type(now):
        return False
    return was == now or was != was  # nan


def _is_same_memory(was: torch.Tensor, now: torch.Tensor) -> bool:
    """Are they the same entries of one piece of memory, under two names?"""
    if isinstance(now, FakeTensor) and not isinstance(
        was, FakeTensor
    ):  # one that is traced, and what it stands for
        was = now.fake_mode.from_tensor(was, static_shapes=True)
    if was.layout is not torch.strided or now.layout is not torch.strided or was.dtype is not now.dtype:
        return False
    facts = [(t.shape, t.stride(), t.storage_offset()) for t in (was, now)]
    return storage_of(was) == storage_of(now) and facts[0] == facts[1]


def _changes(model: torch.nn.Module, before: dict, after: dict) -> list[Change]:
    """New ones that the class does not have either are left out: nothing has read them."""
    changes = []
    for path in sorted(before.keys() & after.keys()):
        was, now, kind = before[path], after[path], type(model.get_submodule(path))
        for name in sorted(was.keys() | now.keys()):
            old = was[name] if name in was else look(getattr(kind, name, torch))
            new = now.get(name, MISSING)
            if old is not MISSING and not _is_same(old, new):
                changes.append(Change(path, name, old, new))
    return changes


def _difference(was: Any, now: Any) -> str:
    """Of containers that have as many elements as before, the first inside that became another one."""
    if isinstance(was, tuple) and isinstance(now, tuple) and was[:2] == now[:2]:
        inside = zip(was[2], now[2])
        pair = next(((a, b) for a, b in inside if not _is_same(a, b)), None)
        if pair is not None:
            before, after = map(_text_inside, pair)
            return f"in {_text(now)}: {before} -> {'other values' if before == after else after}"
    return f"{_text(was)} -> {_text(now)}"


def _text_inside(look: Any) -> str:
    """Of one of `_looks_inside`."""
    if not isinstance(look, tuple):
        return _text(look)
    kind, content = look
    return f"{kind.__name__} of {content}" if isinstance(kind, type) else f"array of {kind}"


def _text(look: Any) -> str:
    if look is MISSING:
        return "something else"
    if isinstance(look, tuple):
        return f"{look[0]} of {look[1]}"
    if isinstance(look, (torch.nn.Module, torch.Tensor)):
        return "another tensor" if isinstance(look, torch.Tensor) else type(look).__name__
    return repr(look)
