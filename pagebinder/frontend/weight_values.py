"""Branches by values of weights: what is asked of parameters, buffers and constants alone is answered while tracing.

    if self.freqs_cos[0, 0] == 0: ...; assert not self.weight.isnan().any()     the branch that the model takes
    scale = float(self.alpha); n = self.count.item()                            the number, as a constant
    if x.abs().max() > 1: ...; self.scale[T] > 0                                refused: not of weights alone

torch.export traces with tensors that have no values. What such a question is made of is in the graph that is being
written: where that begins with weights and nothing else, it is run with the real ones. The graph then holds for these
values, which the report says. Only a model that cannot be traced otherwise is traced so: it follows its weights then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from pagebinder.errors import CaptureError
from pagebinder.frontend.own_code import is_known
from pagebinder.frontend.python_state import set_attribute, traced_in_steady_state
from pagebinder.frontend.traced_values import all_behind, node_of
from pagebinder.graph_tools import aten, calls, is_call, storage_of, tensors, written_by

_NOT_MODELS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
_TENSOR = torch.Tensor
QUESTIONS = frozenset({
    _TENSOR.__bool__, _TENSOR.__int__, _TENSOR.__float__, _TENSOR.__index__, _TENSOR.__complex__, _TENSOR.item,
    _TENSOR.tolist, _TENSOR.is_nonzero, torch.is_nonzero, _TENSOR.equal, torch.equal, _TENSOR.allclose,
    torch.allclose,
})  # fmt: skip
NUMBERS = (aten.item.default, aten._local_scalar_dense.default)
MOST_NAMED = 3
KEY = "decided_by_weights"  # in meta of input_ids


@dataclass(frozen=True)
class Decision:
    """A line of the model's code, and the weights whose values it asked for."""

    place: str
    weights: tuple[str, ...]


def answering(
    model: torch.nn.Module, export: Callable[..., tuple], decisions: list[Decision]
) -> Callable[..., tuple]:
    """As `export`, which takes a function as `traced_in_steady_state` or nothing for that; in this case once more
    with answers, if it is refused or its program reads numbers, which no graph is served with. Adds what was answered
    to `decisions`."""

    def exported(traced: Callable[..., ExportedProgram] = traced_in_steady_state) -> tuple:
        first = refused = again = None
        try:
            first = export(traced)
        except CaptureError as error:
            refused = error
        reads_numbers = first is not None and any(map(_is_read, calls(first[0].graph, *NUMBERS)))
        if (
            traced is traced_in_steady_state
            and not is_known(model)
            and (refused is not None or reads_numbers)
        ):
            values = WeightValues(model)
            with contextlib.suppress(CaptureError):
                again = export(values.traced(traced))
            if refused is not None and values.without_values:
                raise CaptureError(f"{refused}\n{_no_values(values.without_values)}") from refused
            if again is not None and values.decisions:
                decisions.extend(values.decisions)
                return again
        if refused is not None:
            raise refused
        return first

    return exported


def _is_read(number: Node) -> bool:
    """Is something computed with it, beside what assertions ask?"""
    queue = [number]
    for node in queue:  # which grows
        for user in node.users:
            if user.op == "output" or (tensors(user) and not is_call(user, aten.scalar_tensor.default)):
                return True
            queue.append(user)
    return False


def _no_values(places: list[str]) -> str:
    return (
        f"  The code asks for values of weights at {_some(list(dict.fromkeys(places)))}: on the meta device they "
        "have none. Compile the model with its weights."
    )


class _NotOfWeights(Exception):
    pass


class WeightValues(TorchFunctionMode):
    """Answers questions to tensors of a trace by the values of `model`, which the trace calls.

    decisions: what was answered. without_values: lines that ask for weights on the meta device.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.real = _named_tensors(model)
        self.names: dict[Node, str] = {}
        self.decisions: list[Decision] = []
        self.without_values: list[str] = []

    def traced(self, trace_of: Callable[..., ExportedProgram]) -> Callable[..., ExportedProgram]:
        """As `trace_of(model, wrapper, trace)`, which this answers meanwhile."""

        def traced(model: torch.nn.Module, wrapper: torch.nn.Module, trace: Callable) -> ExportedProgram:
            forward = wrapper.forward

            @functools.wraps(forward)
            def answered(*args, **kwargs):
                # Now, as forward may put others in their places.
                nodes = ((node_of(tensor), name) for name, tensor in _named_tensors(self.model).items())
                self.names = {n: name for n, name in nodes if n is not None and n.op == "placeholder"}
                with self:
                    return forward(*args, **kwargs)

            with set_attribute(wrapper, "forward", answered):
                return trace_of(model, wrapper, trace)

        return traced

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in QUESTIONS:
            try:
                return self._answer(func, args, kwargs)
            except _NotOfWeights:
                pass
        return func(*args, **kwargs)

    def _answer(self, func, args: tuple, kwargs: dict) -> Any:
        asked = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made_of = {id(t): _made_of(t) for t in asked}
        behind = {node for nodes in made_of.values() for node in nodes}
        names = {self.names.get(node) for node in behind if node.op == "placeholder"}
        if None in names:
            raise _NotOfWeights
        place = _place()
        if any(self.real[name].is_meta for name in names):
            self.without_values.append(place)
            raise _NotOfWeights
        values = {node: self.real[self.names[node]] for node in behind if node.op == "placeholder"}
        values |= {node: _constant(node) for node in behind if node.op == "get_attr"}
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            args, kwargs = tree_map_only(
                torch.Tensor,
                lambda t: _value(made_of[id(t)], values) if made_of[id(t)] else t,
                (args, kwargs),
            )
            answer = func(*args, **kwargs)
        self.decisions.append(Decision(place, tuple(sorted(names))))
        return answer


def known_by_weights(question: torch.Tensor) -> bool | None:
    """The truth of a value that is traced, if it is made of weights alone and such are answered; else None."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, WeightValues):
            with contextlib.suppress(_NotOfWeights):
                return mode._answer(_TENSOR.__bool__, (question,), {})
    return None


def note_decisions(graph: Graph, decisions: Iterable[Decision]) -> None:
    """Keep them with the graph that they were made for."""
    if decisions:
        node = next(n for n in graph.nodes if n.op == "placeholder" and n.target == "input_ids")
        node.meta[KEY] = tuple(dict.fromkeys(decisions))


def decisions_of(graph: Graph) -> tuple[Decision, ...]:
    return next((n.meta[KEY] for n in graph.nodes if KEY in n.meta), ())


def described_decisions(decisions: Iterable[Decision]) -> str:
    """For a report."""
    names = list(dict.fromkeys(name for d in decisions for name in d.weights)) or ["constants"]
    places = list(dict.fromkeys(d.place for d in decisions))
    return (
        f"The model's code decides by values of {_some(names)} ({_some(places)}): the graph has what follows from "
        "them as they are now, and does not follow them when they are changed: compile again."
    )


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return ", ".join(texts[:MOST_NAMED]) + more


def _made_of(tensor: torch.Tensor) -> list[Node]:
    """All that a value is made of, itself last; empty: it has values.

    Raises:
        _NotOfWeights: it is not known what it is made of, or that is another whenever it is computed.
    """
    node = node_of(tensor)
    if node is None:
        if isinstance(tensor, FakeTensor):
            raise _NotOfWeights
        return []
    nodes = all_behind(node)
    kept = {storage_of(t) for n in nodes if n.op in ("placeholder", "get_attr") for t in tensors(n)}
    for n in nodes:
        is_op = isinstance(n.target, torch._ops.OpOverload)
        if n.op == "call_function" and (
            not (is_op or getattr(n.target, "__module__", "") == "_operator")
            or (is_op and torch.Tag.nondeterministic_seeded in n.target.tags)
            or any(storage_of(t) in kept for written in written_by(n) for t in tensors(written))
        ):
            raise _NotOfWeights
    return [*(n for n in nodes if n is not node), node]


def _value(made_of: list[Node], known: dict[Node, torch.Tensor]) -> torch.Tensor:
    values: dict[Node, Any] = dict(known)
    for node in made_of:
        if node not in values:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values[made_of[-1]]


def _constant(node: Node) -> torch.Tensor:
    value = getattr(get_proxy_mode().tracer.root, node.target, None)
    value = value.constant if isinstance(value, FakeTensor) else value
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise _NotOfWeights
    return value


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for pairs in named for name, tensor in pairs}


def _place() -> str:
    """The innermost line outside of torch and of our own functions around modules."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_MODELS):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split(os.sep)[-3:])}:{frame.f_lineno}"
