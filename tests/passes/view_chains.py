"""Graphs that are one tensor in a memory of numbers, with views of it: small, with sizes that steps differ in."""

from __future__ import annotations

import functools
import operator

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from pagebinder.graph_tools import aten, set_val

MEMORY = 1 << 14
SIZES = {"T": 6, "U": 7}  # that the graph is made with


class Chains:
    """`memory` [MEMORY], and a tensor of T and one of U entries, whose sizes are symbols."""

    def __init__(self) -> None:
        self.graph, mode = Graph(), FakeTensorMode(shape_env=ShapeEnv())
        self.env = mode.shape_env
        self.memory = self.input("memory", mode.from_tensor(torch.arange(MEMORY, dtype=torch.float32)))
        self.sizes: dict[str, Node] = {}
        self.symbols = {}
        for name, size in SIZES.items():
            context = StatelessSymbolicContext([DimDynamic.DYNAMIC])
            vector = self.input(name, mode.from_tensor(torch.zeros(size), symbolic_context=context))
            self.symbols[name] = vector.meta["val"].shape[0].node.expr
            self.sizes[name] = self.call(aten.sym_size.int, vector, 0)

    def input(self, name: str, value: torch.Tensor) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, op, *args) -> Node:
        """A call; sizes may be given by their letters. Raises what torch raises for it."""
        node = self.graph.call_function(op, self._with_sizes(args))
        node.meta |= {
            "nn_module_stack": {"": ("body", object)},
            "stack_trace": 'File "body.py", line 1, in f',
        }
        try:
            set_val(node)
        except Exception:
            self.graph.erase_node(node)
            raise
        return node

    def base(self, sizes, order=None, gap: int = 1) -> Node:
        """A tensor whose dimensions lie in this order in memory, the last one innermost, `gap` entries apart."""
        strides, entries = [0] * len(sizes), gap
        for dim in reversed(order or range(len(sizes))):
            strides[dim] = entries
            entries = self._times(entries, self.sizes.get(sizes[dim], sizes[dim]))
        return self.call(aten.as_strided.default, self.memory, list(sizes), strides)

    def _times(self, a, b):
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        node = self.graph.call_function(operator.mul, (a, b))
        node.meta["val"] = operator.mul(*(n.meta["val"] if isinstance(n, Node) else n for n in (a, b)))
        return node

    def chain(self, base: Node, *calls) -> Node:
        """(op, arguments ...) on the result of the one before."""
        return functools.reduce(lambda x, call: self.call(call[0], x, *call[1:]), calls, base)

    def hold_for(self, **sizes: int) -> bool:
        """May the graph be run with these sizes? An op may have been captured for some alone: torch's guards."""
        values = {symbol: sizes.get(name, SIZES[name]) for name, symbol in self.symbols.items()}
        return all(bool(guard.expr.subs(values)) for guard in self.env.guards)

    def module(self, *results: Node) -> GraphModule:
        self.graph.output(results)
        self.graph.lint()
        return GraphModule(torch.nn.Module(), self.graph)

    def _with_sizes(self, value):
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._with_sizes, value))
        return self.sizes[value] if isinstance(value, str) else value


def run(gm: GraphModule, memory: torch.Tensor, **sizes: int) -> tuple[torch.Tensor, ...]:
    """The results for other sizes."""
    return gm(memory, *(torch.zeros(sizes.get(name, size)) for name, size in SIZES.items()))


def names(node: Node) -> list[str]:
    """The ops from the base to a node."""
    if node.op != "call_function" or node.target is aten.as_strided.default:
        return []
    return [*names(node.args[0]), node.target._opname]


def results(gm: GraphModule) -> list[Node]:
    return list(next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0])


def same_results(gm: GraphModule, other: GraphModule, **sizes: int) -> bool:
    """Do two graphs give the same? Sizes, offset and values, strides where a dimension has more than one entry, and
    whether a result lies in the memory that they were given."""
    found = []
    for graph in (gm, other):
        memory = torch.arange(MEMORY, dtype=torch.float32)
        of_memory = memory.untyped_storage().data_ptr()
        found.append(
            [(_place(t), t.untyped_storage().data_ptr() == of_memory, t) for t in run(graph, memory, **sizes)]
        )
    return all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(*found, strict=True))


def _place(tensor: torch.Tensor) -> tuple:
    strides = [s for s, size in zip(tensor.stride(), tensor.shape) if size > 1]
    return tensor.shape, strides, tensor.storage_offset()
