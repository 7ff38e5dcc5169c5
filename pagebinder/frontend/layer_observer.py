"""Which layers of a model do the same? They are run once on tensors without values, and every op is noted.

    candidates      children of a ModuleList or Sequential that is in no other one, called once, of transformers' code
    noted           each aten op and op of ours within a layer, with its options, and where its operands come from:
                    the layer's arguments, its weights, its own results, small constants
    the same        modules that hold the same (layer_facts.py), called alike, with the same notes at two lengths

A layer is only compared if all that goes in or out is an argument, a weight or a result: one that reads a tensor of
another layer's from elsewhere, leaves one for another layer, or writes into an argument is traced by itself.
What a layer does beside its tensors is not seen: counts on an object, lists that are read later, a look at its own
class. No layer of transformers does that (`make zoo` compares all architectures); other code may, and is not copied.
Running a layer on tensors of known sizes takes a thirtieth of the time that torch.export needs for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves

from pagebinder.frontend.layer_facts import SMALL, layout, same_facts, values_of
from pagebinder.frontend.own_code import is_known
from pagebinder.graph_tools import storage_of

MAX_NUMBERS = (
    1 << 22
)  # in a tensor that is really made: what code makes on the CPU, whatever its arguments are on
MAX_OPS = 50_000  # a model that needs more for one call writes loops out
LENGTHS = (40, 4099)  # in tokens: what code decides by a length should show between them


@dataclass(eq=False)
class Layer:
    """A candidate, and what its call was seen to do."""

    path: str
    place: int
    module: torch.nn.Module
    weights: dict[int, str]  # id -> name
    num_calls: int = 0
    is_closed: bool = True  # nothing but arguments and weights goes in, nothing but results out
    arguments: dict[int, int] = field(default_factory=dict)  # id -> number
    storages: set[int] = field(default_factory=set)  # of arguments and weights
    results: set[int] = field(default_factory=set)  # numbers of its own tensors that it returns
    used: dict[str, None] = field(default_factory=dict)  # names of the weights that it read, in order
    notes: list[tuple] = field(default_factory=list)
    num_made: int = 0


def candidates(model: torch.nn.Module) -> list[tuple[str, int, torch.nn.Module]]:
    """(path, place, module) of modules of which several of one class are in one list."""
    if _global_forward_hooks or _global_forward_pre_hooks:
        return []
    times: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        times[id(module)] = times.get(id(module), 0) + 1
    found, inside = [], ""
    for path, module in model.named_modules():
        if inside and path.startswith(inside):
            continue
        if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) or len(module) < 2:
            continue
        inside = f"{path}." if path else ""
        children = [(f"{inside}{name}", i, m) for i, (name, m) in enumerate(module.named_children())]
        classes = [type(m) for _, _, m in children]
        several = [c for c in children if classes.count(type(c[2])) > 1 and times[id(c[2])] == 1]
        found += [c for c in several if is_known(c[2])]
    return found


def same_layers(
    model: torch.nn.Module, call: torch.nn.Module, examples: Sequence[Callable[[], tuple]]
) -> list[tuple[Layer, Layer]]:
    """(layer, the first layer that does the same), for layers that are not the first.

    Args:
        model: holds the layers.
        call: the module that is traced; calls `model`.
        examples: make arguments of `call` on the meta device, of several lengths.
    Raises:
        RuntimeError: a call keeps something in the model, or runs too many ops; whatever the model's code raises
            where tensors have no values.
    """
    found = candidates(model)
    if not found:
        return []
    return _same([_observe(found, call, example) for example in examples])


def _same(runs: list[list[Layer]]) -> list[tuple[Layer, Layer]]:
    others = [{layer.path: layer for layer in run} for run in runs[1:]]
    leaders: list[list[Layer]] = []
    same = []
    for layer in runs[0]:
        seen = [layer, *(run[layer.path] for run in others if layer.path in run)]
        if len(seen) < len(runs) or not all(s.num_calls == 1 and s.is_closed for s in seen):
            continue
        leader = next((lead for lead in leaders if _alike(lead, seen)), None)
        if leader is None:
            leaders.append(seen)
        else:
            same.append((layer, leader[0]))
    return same


def _alike(a: list[Layer], b: list[Layer]) -> bool:
    """Two layers, each as it was seen at every length."""
    if any(x.notes != y.notes for x, y in zip(a, b)):
        return False
    return same_facts(a[0].module, b[0].module, (a[0].place, b[0].place))


def _observe(
    found: list[tuple[str, int, torch.nn.Module]], call: torch.nn.Module, example: Callable[[], tuple]
) -> list[Layer]:
    """The layers in the order of their calls, with what was noted."""
    called: list[Layer] = []
    observer = _Observer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_kept_as_it_is(call))
        stack.enter_context(_on_meta(call))
        for path, place, module in found:
            layer = Layer(path, place, module, _weights(module))
            stack.enter_context(replaced_forward(layer.module, observer.forward_of(layer, called)))
        stack.enter_context(_as_in_export())
        stack.enter_context(torch.device("meta"))
        arguments = example()
        stack.enter_context(observer)
        call(*arguments)
    return called


@contextlib.contextmanager
def _kept_as_it_is(model: torch.nn.Module) -> Iterator[None]:
    """What modules hold is put back, if a call leaves something there: a table for longer prompts, a counter.

    Raises:
        RuntimeError: it did.
    """
    before = [(held, held.copy() if held else ()) for m in model.modules() for held in _containers(m)]
    try:
        yield
    finally:
        changed = [(held, content) for held, content in before if not _same_items(held, content)]
        for held, content in changed:
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(content)
    if changed:
        raise RuntimeError("the model keeps something of its call")


def _containers(module: torch.nn.Module) -> list:
    values = module.__dict__.values()
    return [module.__dict__, *(v for v in values if isinstance(v, dict | list | set) and hasattr(v, "copy"))]


def _same_items(a, b) -> bool:
    """The same objects; tensors are not compared by their values."""
    if len(a) != len(b) or not a:
        return len(a) == len(b)
    if isinstance(a, set):
        return a == b
    if isinstance(a, dict):
        return list(a) == list(b) and _same_items(list(a.values()), list(b.values()))
    return all(x is y or _equal_numbers(x, y) for x, y in zip(a, b))


def _equal_numbers(x, y) -> bool:
    return isinstance(x, int | float | str) and type(x) is type(y) and x == y


@contextlib.contextmanager
def _on_meta(module: torch.nn.Module) -> Iterator[None]:
    """The module with weights that have no values."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    on_meta = {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        for name, t in tensors.items()
    }
    with _reparametrize_module(module, on_meta, tie_weights=True):
        yield


def _weights(module: torch.nn.Module) -> dict[int, str]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {id(tensor): name for name, tensor in named}


@contextlib.contextmanager
def replaced_forward(module: torch.nn.Module, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """`module.forward` is `make(forward)` for the duration.

    By a class of its own: torch.export calls modules through proxies that know their paths, and `self` is one.
    """
    own = module.__dict__.get("forward")
    if own is not None:
        module.forward = functools.wraps(own)(make(own))
        try:
            yield
        finally:
            module.forward = own
        return
    base = type(module)

    # By another name: torch notes the frames of functions that are called forward as the model's own.
    @functools.wraps(base.forward)
    def replacement(self, *args, **kwargs):
        return make(functools.partial(base.forward, self))(*args, **kwargs)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "forward": replacement}
    module.__class__ = type(base.__name__, (base,), names)
    try:
        yield
    finally:
        module.__class__ = base


@contextlib.contextmanager
def _as_in_export() -> Iterator[None]:
    """Code that asks whether it is exported takes the way that it will take then."""
    flags = [f for f in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(torch.compiler, f)]
    before = [getattr(torch.compiler, flag) for flag in flags]
    for flag in flags:
        setattr(torch.compiler, flag, True)
    try:
        yield
    finally:
        for flag, value in zip(flags, before):
            setattr(torch.compiler, flag, value)


class _Observer(TorchDispatchMode):
    """Notes what each layer does while it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Layer | None = None
        self.made: dict[int, tuple[Layer | None, int]] = {}  # id of a tensor -> who made it, its number
        self.kept: list = []  # so that no id is used again
        self.num_ops = 0
        self.layouts: dict[tuple, list[tuple]] = {}  # of results, by `_key`

    def forward_of(self, layer: Layer, called: list[Layer]):
        def make(forward):
            def observed(*args, **kwargs):
                layer.num_calls += 1
                if self.layer is not None or layer.num_calls > 1:
                    layer.is_closed = False
                    return forward(*args, **kwargs)
                called.append(layer)
                self._enter(layer, args, kwargs)
                try:
                    out = forward(*args, **kwargs)
                finally:
                    self.layer = None
                self._leave(layer, out)
                return out

            return observed

        return make

    def _enter(self, layer: Layer, args: tuple, kwargs: dict) -> None:
        leaves, spec = tree_flatten((args, kwargs))
        note = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._origin(leaf)
                number = layer.arguments.setdefault(id(leaf), len(layer.arguments))
                layer.storages.add(storage_of(leaf))
                note.append((number, layout(leaf)))
                self.kept.append(leaf)
            else:
                note.append(_constant(leaf))
        layer.notes.append(("call", spec, tuple(note)))
        for tensor in (*layer.module.parameters(), *layer.module.buffers()):
            layer.storages.add(storage_of(tensor))
        self.layer = layer

    def _leave(self, layer: Layer, out) -> None:
        leaves, spec = tree_flatten(out)
        note, storages = [], set(layer.storages)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                note.append(_constant(leaf))
                continue
            if id(leaf) not in layer.arguments:  # a view, into which the caller might write
                layer.is_closed = layer.is_closed and storage_of(leaf) not in storages
                storages.add(storage_of(leaf))
            maker, number = self.made.get(id(leaf), (None, -1))
            if maker is layer:
                layer.results.add(number)
                note.append(("made", number))
            elif id(leaf) in layer.arguments:
                note.append(("argument", layer.arguments[id(leaf)]))
            else:
                layer.is_closed = False
        layer.notes.append(("return", spec, tuple(note)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.num_ops += 1
        if self.num_ops > MAX_OPS:
            raise RuntimeError(f"more than {MAX_OPS} ops")
        layer = self.layer
        leaves, spec = tree_flatten((args, kwargs))
        out = self._result(func, args, kwargs, leaves)
        operands = tuple(self._operand(x) if isinstance(x, torch.Tensor) else _constant(x) for x in leaves)
        if layer is not None:
            layer.notes.append((func, spec, operands))
            if any(storage_of(tensor) in layer.storages for tensor in written_operands(func, args, kwargs)):
                layer.is_closed = False  # it may write into what it made itself
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not self._was_there(tensor):
                self.made[id(tensor)] = layer, 0 if layer is None else layer.num_made
                self.kept.append(tensor)
                if layer is not None:
                    layer.num_made += 1
        return out

    def _result(self, func, args: tuple, kwargs: dict, leaves: list):
        """What the op returns. On the meta device that follows from the layouts of its operands, and is remembered:
        some ops take a hundred times as long to find it out."""
        key = _key(func, args, kwargs, leaves) if _makes_new_tensors(func) else None
        if key is not None and (layouts := self.layouts.get(key)) is not None:
            tensors = [torch.empty_strided(n, by, dtype=dtype, device=on) for _, n, by, dtype, on in layouts]
            return tensors[0] if len(func._schema.returns) == 1 else tuple(tensors)
        _refuse_real(written_operands(func, args, kwargs))
        out = func(*args, **kwargs)
        _refuse_real(t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.numel() > MAX_NUMBERS)
        made = [out] if isinstance(out, torch.Tensor) else out
        if key is not None and all(type(t) is torch.Tensor and t.device.type == "meta" for t in made):
            self.layouts[key] = [layout(t) for t in made]
        return out

    def _was_there(self, tensor: torch.Tensor) -> bool:
        """Does an op return one of its operands?"""
        layer = self.layer
        is_given = layer is not None and (id(tensor) in layer.arguments or id(tensor) in layer.weights)
        return is_given or id(tensor) in self.made

    def _origin(self, tensor: torch.Tensor) -> tuple[Layer | None, int] | None:
        """Who made a tensor; None: it was there before. One that a layer made and did not return makes that unfit."""
        origin = self.made.get(id(tensor))
        if origin is not None and origin[0] not in (None, self.layer) and origin[1] not in origin[0].results:
            origin[0].is_closed = False
        return origin

    def _operand(self, tensor: torch.Tensor) -> tuple:
        origin, layer = self._origin(tensor), self.layer
        if layer is None:
            return ()
        if id(tensor) in layer.arguments:
            return "argument", layer.arguments[id(tensor)]
        if id(tensor) in layer.weights:
            name = layer.weights[id(tensor)]
            layer.used[name] = None
            return "weight", name
        if origin is not None and origin[0] is layer:
            return "made", origin[1]
        if origin is None and tensor.device.type != "meta" and tensor.numel() <= SMALL:
            layer.storages.add(storage_of(tensor))
            with _disable_current_modes():
                return "constant", layout(tensor), values_of(tensor)
        layer.is_closed = False
        return ("foreign",)


def written_operands(func, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """The operands that an op writes into."""
    if not getattr(getattr(func, "_schema", None), "is_mutable", False):
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (t for t in tree_leaves(given) if isinstance(t, torch.Tensor))


def _refuse_real(tensors: Iterator[torch.Tensor]) -> None:
    """Raises RuntimeError if one of them has values: nothing of the model's is written, nothing large computed."""
    if any(t.device.type != "meta" for t in tensors):
        raise RuntimeError("the model writes into a tensor that it keeps, or makes a large one on the CPU")


@functools.cache
def _makes_new_tensors(func) -> bool:
    """Are the results of an op tensors of their own, and each in a place of the schema?"""
    schema = getattr(func, "_schema", None)
    if schema is None or any(a.alias_info is not None for a in (*schema.arguments, *schema.returns)):
        return False
    return len(schema.returns) > 0 and all(str(r.type) == "Tensor" for r in schema.returns)


def _key(func, args: tuple, kwargs: dict, leaves: list) -> tuple | None:
    """Equal for calls with operands of equal layouts; None: it cannot be told."""
    lengths = tuple(len(a) if isinstance(a, list | tuple) else -1 for a in (*args, *kwargs.values()))
    facts = tuple(layout(x) if isinstance(x, torch.Tensor) else _constant(x) for x in leaves)
    key = func, lengths, tuple(kwargs), facts
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _constant(value) -> tuple:
    """For comparison: 1, True and 1.0 are not the same."""
    return type(value), repr(value) if isinstance(value, float) else value
