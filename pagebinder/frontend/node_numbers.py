"""Numbers for the nodes of a graph: the same for those that compute the same, as code writes one value twice.

x[ids == 3], w[ids == 3]        two nodes of one number
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from pagebinder.graph_tools import size_text


class Numbering:
    """Of one graph, counted as they are asked for."""

    def __init__(self) -> None:
        self._numbers: dict[Node, int] = {}
        self._known: dict[tuple, int] = {}

    def of(self, node: Node) -> int:
        todo = [node]
        while todo:  # no recursion: chains of experts are long
            missing = [n for n in todo[-1].all_input_nodes if n not in self._numbers]
            if missing:
                todo += missing
                continue
            last = todo.pop()
            self._numbers[last] = self._known.setdefault(self._structure(last), len(self._known))
        return self._numbers[node]

    def _structure(self, node: Node) -> tuple:
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt) and not is_of_data(size):
            return ("size", size_text(size))
        pure = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
        drawn = pure and torch.Tag.nondeterministic_seeded in node.target.tags
        if node.op == "get_attr":
            return (node.op, node.target)
        if not (pure and not drawn) and node.target is not operator.getitem:
            return ("itself", node.name)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: ("node", self._numbers[n]))
        return (str(node.target), repr(args), repr(kwargs))


def is_of_data(size) -> bool:
    """Is a size one that only the data knows (torch's symbols u0, u1, ...)?"""
    if not isinstance(size, torch.SymInt):
        return False
    return any(str(symbol).startswith("u") for symbol in size.node.expr.free_symbols)
