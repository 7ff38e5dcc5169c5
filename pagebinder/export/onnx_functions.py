"""What ONNX has no operator for, as model-local functions of standard operators, traced from PyTorch.

    graph      HyperConnection(streams, fn, base, scale) -> post, comb, collapsed       one node a call
    function   pagebinder::HyperConnection(...) { MatMul, Sigmoid, ... }       one for all calls that are alike

A translation calls `local_function` with the PyTorch function that says what is computed. While a model is traced
that is one opaque node; all functions of a model are then traced together and cut apart (`definitions`). Calls are
alike if their options and the fixed sizes and types of their operands are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.onnx.ops import symbolic_multi_out

DOMAIN = "pagebinder"


@dataclass(frozen=True)
class LocalFunction:
    """`body(*tensors)` returns a tuple of tensors. Of each operand: type, sizes (None = any), sizes of an example."""

    name: str
    body: Callable
    num_outputs: int
    operands: tuple[tuple[torch.dtype, tuple[int | None, ...], tuple[int, ...]], ...]


class LocalFunctions:
    """The functions that one model calls, by what makes calls alike."""

    def __init__(self):
        self._known: dict[tuple, LocalFunction] = {}

    def __iter__(self):
        return iter(self._known.values())

    def of_call(
        self, name: str, function: Callable, inputs: Sequence, options: dict, num_outputs: int
    ) -> LocalFunction:
        given = [x for x in inputs if x is not None]
        absent = tuple(x is None for x in inputs)
        fixed = tuple((x.dtype, tuple(n if type(n) is int else None for n in x.shape)) for x in given)
        key = (name, tuple(sorted(options.items(), key=repr)), absent, fixed)
        if key not in self._known:
            same = sum(known.name.partition("_")[0] == name for known in self)
            hints = (tuple(n if type(n) is int else n.node.hint for n in x.shape) for x in given)
            operands = tuple((*types, hint) for types, hint in zip(fixed, hints))
            body = functools.partial(_with_absent, function, absent, options)
            name = f"{name}_{same + 1}" if same else name
            self._known[key] = LocalFunction(name, body, num_outputs, operands)
        return self._known[key]


def local_function(
    step, name: str, function: Callable, inputs, *, like, **options
) -> tuple[torch.Tensor, ...]:
    """function(*inputs, **options) -> tensors, as a call of a model-local function.

    inputs: tensors, or None. like: (dtype, shape) of each result. Outside an export it just runs.
    """
    given = [x for x in inputs if x is not None]
    called = step.functions.of_call(name, function, inputs, options, len(like))
    if not torch.onnx.is_in_onnx_export():
        results = called.body(*given)
        for result, (dtype, shape) in zip(results, like, strict=True):
            assert (result.dtype, tuple(result.shape)) == (dtype, tuple(shape)), (
                f"{name} is declared otherwise"
            )
        return results
    dtypes, shapes = zip(*like)
    name = f"{DOMAIN}::{called.name}"
    return symbolic_multi_out(name, given, dtypes=list(dtypes), shapes=list(shapes), version=1)


def _with_absent(
    function: Callable, absent: Sequence[bool], options: dict, *given
) -> tuple[torch.Tensor, ...]:
    rest = iter(given)
    results = function(*(None if is_absent else next(rest) for is_absent in absent), **options)
    return results if isinstance(results, tuple) else (results,)


class _All(torch.nn.Module):
    """Every function on operands of its own."""

    def __init__(self, functions: Sequence[LocalFunction]):
        super().__init__()
        self.functions = functions

    def forward(self, *inputs):
        rest, results = iter(inputs), []
        for function in self.functions:
            results += function.body(*(next(rest) for _ in function.operands))
        return tuple(results)


def definitions(functions: Sequence[LocalFunction], translate: Callable) -> list:
    """The functions as onnx_ir Functions. translate(module, examples by name, dynamic sizes by name) -> ir.Model."""
    import onnx_ir as ir

    functions, examples, dynamic = list(functions), {}, {}
    if not functions:
        return []
    for function in functions:
        for position, (dtype, sizes, hint) in enumerate(function.operands):
            name = f"{function.name}.{position}"
            examples[name] = torch.zeros(hint, dtype=dtype)
            dynamic[name] = {i: torch.export.Dim.DYNAMIC for i, size in enumerate(sizes) if size is None}
    model = translate(_All(functions).eval(), examples, dynamic)
    inputs_left, outputs, made = iter(model.graph.inputs), iter(model.graph.outputs), []
    for function in functions:
        inputs = [next(inputs_left) for _ in function.operands]
        results = [next(outputs) for _ in range(function.num_outputs)]
        graph = ir.convenience.extract(model.graph, inputs, results)
        made.append(_function(function.name, graph))
    return made


def _function(name: str, graph):
    """A graph as a function, which holds no initialisers: they become constants of its own."""
    import onnx_ir as ir

    constants = []
    for value in list(graph.initializers.values()):
        node = ir.node("Constant", inputs=[], attributes={"value": value.const_value})
        node.outputs[0].name, node.outputs[0].shape, node.outputs[0].dtype = (
            value.name,
            value.shape,
            value.dtype,
        )
        value.replace_all_uses_with(node.outputs[0])
        constants.append(node)
    graph.initializers.clear()
    if constants:
        graph.insert_before(graph[0], constants)
    return ir.Function(domain=DOMAIN, name=name, graph=graph, attributes=())
