"""Leaves: modules of a source model whose token mixing is traced as one of our ops, not as the model's own code.

    transformers' mixer.forward
      projections              traced as they are
      causal_conv1d_fn(...)    a function of the modeling file: for the time of the capture it is ours, which
      ..._delta_rule(...)      emits one pagebinder op
      gated norm, out_proj     traced as they are

A leaf is reversible: it swaps functions of the modeling file, or methods of its classes, while the model is traced
and puts them back. It never misses in silence: a function that is gone or takes other arguments is an error before
the capture, a module that did not emit its ops is one after it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from pagebinder.errors import CaptureError
from pagebinder.graph_tools import calls, describe, first_paths, module_path, num_ops
from pagebinder.report import Match, PassResult, Refusal

LIBRARY = "transformers"
STATE, FORMER_STATE = (
    "cache",
    "past_key_values",
)  # the source's own state: from transformers 5.24 on, and before


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """What to swap for modules of some classes.

    name: for reports. classes: names of the modules' classes, each seen to call exactly these functions.
    functions: function of the modeling file -> ours, or "Class.method" -> ours; every parameter that ours names
        must exist there.
    emits: the ops that each module must have put into the graph with each of its calls; one named twice, twice.
    seen_on: versions of the library that it was tried with.
    library: the package, or the module, that the classes are of.
    remake: makes the tables of a module anew: where they are rounded, the source's computation and ours differ.
    """

    name: str
    classes: tuple[str, ...]
    functions: Mapping[str, Callable]
    emits: tuple[torch._ops.OpOverload, ...]
    seen_on: tuple[str, ...]
    library: str = LIBRARY
    remake: Callable[[torch.nn.Module], None] | None = None

    def modules(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The modules of a model that this leaf is for, by path."""
        return {
            path: module
            for path, module in model.named_modules()
            if type(module).__name__ in self.classes
            and f"{type(module).__module__}.".startswith(f"{self.library}.")
        }

    def applies(self, model: torch.nn.Module) -> bool:
        return bool(self.modules(model))

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        """The functions swapped for the duration, in every modeling file that the model's modules come from.

        Raises:
            CaptureError: a modeling file lacks a function or method, or it takes other arguments than expected.
        """
        with contextlib.ExitStack() as stack:
            for file in {type(module).__module__ for module in self.modules(model).values()}:
                for name, ours in self.functions.items():
                    owner, attribute = self._owner(file, name)
                    fitting = self._fitting(file, name, getattr(owner, attribute, None), ours)
                    stack.enter_context(swapped(owner, attribute, fitting))
            yield

    def refused(self, model: torch.nn.Module) -> dict[str, str]:
        """Modules that this leaf might have been for, by path, and why it is not: they are traced as they are."""
        return {}

    def expected(self, module: torch.nn.Module) -> Counter:
        """How many calls of each op a module of this leaf must have emitted, each time that it was called."""
        return Counter(self.emits)

    @staticmethod
    def _owner(file: str, name: str) -> tuple[object, str]:
        """What holds `name`, "function" or "Class.method", of a modeling file, and its name there."""
        *path, attribute = name.split(".")
        owner = sys.modules[file]
        for part in path:
            owner = getattr(owner, part, None)
        return owner, attribute

    def _fitting_method(self, module: torch.nn.Module, name: str, ours: Callable) -> Callable:
        """`_fitting` of a method of a module."""
        return self._fitting(type(module).__module__, name, getattr(module, name, None), ours)

    def _fitting(self, file: str, name: str, original, ours: Callable) -> Callable:
        """Ours, to be called as `name` of a modeling file is, which is `original`.

        Raises:
            CaptureError: there is no `original`, or it does not take what ours does.
        """
        if original is None:
            raise CaptureError(self._changed(f"{file} has no function {name}"))
        theirs = set(inspect.signature(original).parameters)
        missing = [p for p in _named_parameters(ours) if p not in theirs and renamed(p, theirs) not in theirs]
        if missing:
            raise CaptureError(self._changed(f"{name} in {file} does not take {', '.join(missing)}"))
        return ours if renamed(STATE, theirs) == STATE else _told_by_its_former_name(ours)

    def _changed(self, what: str) -> str:
        """The message of an error: `what` differs from what this leaf was written for."""
        return (
            f"The {self.name} of this version of {self.library} is not the one known here ({what}). "
            f"It was seen on {self.library} {' and '.join(self.seen_on)}; install one of these."
        )


def applicable(leaves: Sequence[Leaf], model: torch.nn.Module) -> list[Leaf]:
    return [leaf for leaf in leaves if leaf.applies(model)]


@contextlib.contextmanager
def patched(leaves: Sequence[Leaf], model: torch.nn.Module) -> Iterator[None]:
    """All leaves that apply to a model, for the duration."""
    with contextlib.ExitStack() as stack:
        for leaf in applicable(leaves, model):
            stack.enter_context(leaf.patched(model))
        yield


def captured_leaves(leaves: Sequence[Leaf], model: torch.nn.Module, captured: GraphModule) -> PassResult:
    """What the leaves put into a captured graph, as matches for the report.

    Raises:
        CaptureError: a module of a leaf did not emit its ops, each as often as expected.
    """
    size = num_ops(captured)
    result = PassResult(name="leaves", num_ops_before=size, num_ops_after=size)
    for leaf in leaves:
        refusals = leaf.refused(model).items()
        result.refusals += [
            Refusal(pattern=leaf.name, reason=reason, node="", module_path=path, source_line="")
            for path, reason in refusals
        ]
    first = first_paths(model)
    for leaf in applicable(leaves, model):
        modules, emitted = leaf.modules(model), Counter()
        for node in calls(captured.graph, *leaf.emits):
            if (path := first.get(module_path(node))) not in modules:
                continue
            emitted[path, node.target] += 1
            detail = str(node.target).removeprefix("pagebinder.").removesuffix(".default")
            result.matches.append(Match(pattern=leaf.name, detail=detail, **describe(node)))
        for path, module in modules.items():
            expected = leaf.expected(module)
            # Of a module that a loop calls several times, that many times as much.
            times = max((emitted[path, op] // number for op, number in expected.items() if number), default=1)
            for op, number in expected.items():
                if emitted[path, op] != max(times, 1) * number:
                    what = f"{path} emitted {emitted[path, op]} calls of {op}, not {number}"
                    raise CaptureError(leaf._changed(what))
    return result


@contextlib.contextmanager
def swapped(module, name: str, ours: Callable) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, before)


def renamed(parameter: str, theirs: Collection[str]) -> str:
    """The name of one of our parameters in a function that takes `theirs`."""
    return FORMER_STATE if parameter == STATE and FORMER_STATE in theirs else parameter


def _told_by_its_former_name(ours: Callable) -> Callable:
    @functools.wraps(ours)
    def told(*args, **kwargs):
        return ours(*args, **{STATE if name == FORMER_STATE else name: x for name, x in kwargs.items()})

    return told


def restore_forward(module: torch.nn.Module, before) -> None:
    """`before` None: the class's own, found again when ours is gone."""
    if before is None:
        del module.forward
    else:
        module.forward = before


def _named_parameters(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.items()
    return [name for name, p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
