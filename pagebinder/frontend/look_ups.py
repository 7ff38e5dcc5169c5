"""The look-ups of a captured graph: which values are numbers of rows of which tables.

    embedding(table, index), index_select(table, 0, index), table[index], table[:, index], gather(table, 1, index)

A dimension of a table that has a symbolic size is none of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from pagebinder.graph_tools import aten, calls, module_path, skip_casts, val

_INDICES = {
    aten.index.Tensor: 1,
    aten.index_select.default: 2,
    aten.gather.default: 2,
    aten.embedding.default: 1,
}


@dataclass(frozen=True, kw_only=True)
class LookUp:
    """`index` holds numbers of rows of `table`, which has `num_rows` of them, a fixed number.

    `lowest`: the smallest number that is no error, 0, or -num_rows where torch counts from the end.
    """

    table: Node
    index: Node
    num_rows: int
    lowest: int = 0

    @property
    def name(self) -> str:
        """The parameter or buffer, or the module that makes the table."""
        made_by = skip_casts(self.table)
        return made_by.target if made_by.op == "get_attr" else f"of {module_path(made_by) or 'the model'}"


def look_ups(graph: Graph) -> Iterator[LookUp]:
    """All look-ups by numbers in tables whose size does not depend on the number of tokens, in execution order."""
    for node in calls(graph, *_INDICES):
        table = node.args[0]
        for dim, index in _indices(node):
            size = val(table).shape[dim]
            if isinstance(size, int):
                lowest = -size if node.target is aten.index.Tensor else 0
                yield LookUp(table=table, index=index, num_rows=size, lowest=lowest)


def _indices(node: Node) -> list[tuple[int, Node]]:
    """The dimensions of the table that are indexed, and by what; none for a mask."""
    index = node.args[_INDICES[node.target]]
    if node.target is aten.embedding.default:
        return [(0, index)]
    if node.target is not aten.index.Tensor:
        return [(node.args[1], index)]
    indices = [(dim, n) for dim, n in enumerate(index) if n is not None]
    return [] if any(val(n).dtype is torch.bool for _, n in indices) else indices
