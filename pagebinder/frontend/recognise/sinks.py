"""Attention sinks: a column that is joined to the scores, one value for each head, and gets no value of its own.

    cat(scores [.., H, T, T], column [.., H, T, 1])         or the column in front, or heads as [G, group]
    column = expand(sinks [H]) | expand(one number) | zeros

Between the values and the column may stand views and casts; a cast rounds, so it is made again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.recognise.operands import NotAttention
from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, insert_call, is_call, val

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
         aten.squeeze.dim, aten.squeeze.default, aten.flatten.using_ints, aten.unflatten.int)  # fmt: skip
_EXPANSIONS = (aten.expand.default, aten.expand_as.default)
# op -> the number that it fills a tensor with, or the position of the argument that says it
_FILLS = {
    aten.zeros.default: 0.0, aten.zeros_like.default: 0.0, aten.new_zeros.default: 0.0, aten.ones.default: 1.0,
    aten.ones_like.default: 1.0, aten.new_ones.default: 1.0,
}  # fmt: skip
_FILLS_WITH = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}


@dataclass
class Sinks:
    """`source`: a node of H values, or of one for all heads, or a number. `casts`: what rounds them, in order.

    `in_front`: the column is the first of the row. `nodes`: what lies between the source and the column.
    """

    heads: int
    source: Node | float
    casts: list[torch.dtype]
    in_front: bool
    nodes: set[Node] = field(default_factory=set)

    def emit(self, gm: GraphModule, where: Node) -> Node:
        """The sinks [H] float32, computed before `where`."""
        if not isinstance(self.source, Node):
            options = {"dtype": torch.float32, "device": val(where).device}
            return insert_call(gm.graph, where, aten.full.default, ([self.heads], self.source), options)
        node = self.source
        if val(node).dim() != 1:
            node = insert_call(gm.graph, where, aten.reshape.default, (node, [-1]))
        for dtype in (*self.casts, torch.float32):
            if val(node).dtype is not dtype:
                node = insert_call(gm.graph, where, aten.to.dtype, (node, dtype))
        if val(node).shape[0] != self.heads:
            node = insert_call(gm.graph, where, aten.expand.default, (node, [self.heads]))
        return node


def joined(cat: Node) -> tuple[Node, Sinks]:
    """(scores, the sinks that are joined to them) of a concatenation.

    Raises:
        NotAttention: something else is joined.
    """
    parts = cat.args[0]
    if len(parts) != 2 or arg(cat, 1, "dim", 0) not in (-1, val(cat).dim() - 1):
        raise NotAttention("scores are concatenated")
    in_front = isinstance(val(parts[0]).shape[-1], int)
    column, scores = parts if in_front else reversed(parts)
    width = val(column).shape[-1]
    if not isinstance(width, int) or width != 1:
        raise NotAttention("more than one column is appended to the scores")
    return scores, _sinks_of(column, in_front)


def cuts_column(cut: Node, sinks: Sinks) -> bool:
    """Does a slice of the weights drop the column of the sinks, and nothing else?"""
    x, shape = val(cut.args[0]), val(cut).shape
    start, end = arg(cut, 2, "start") or 0, arg(cut, 3, "end")
    to_the_end = end is None or (isinstance(end, int) and end >= 2**31)
    where = start == 1 and to_the_end if sinks.in_front else start == 0
    one_less = isinstance(shape[-1], torch.SymInt) and x.shape[-1].node.expr - shape[-1].node.expr == 1
    is_last = arg(cut, 1, "dim", 0) in (-1, x.dim() - 1)
    return bool(is_last and where and one_less and arg(cut, 4, "step", 1) == 1)


def _sinks_of(column: Node, in_front: bool) -> Sinks:
    node, of_heads = column, _sizes(column)  # [H], or [G, group]
    heads = math.prod(of_heads) if val(column).dim() >= 3 else 0
    known = ([heads], of_heads, [])
    casts, nodes = [], set()
    while is_call(node, *CASTS, *IDENTITIES, *VIEWS, *_EXPANSIONS):
        if _sizes(node) not in known:
            break
        if val(node).dtype is not val(node.args[0]).dtype:
            casts.insert(0, val(node).dtype)
        nodes |= {node, *_only_for_size(node)}
        node = node.args[0]
    if is_call(node, *_FILLS, *_FILLS_WITH):
        value = _FILLS.get(node.target, arg(node, _FILLS_WITH.get(node.target, 1), "fill_value"))
        if isinstance(value, (int, float)):
            return Sinks(heads, float(value), [], in_front, nodes | {node, *_only_for_size(node)})
    has_tokens = any(isinstance(size, torch.SymInt) for size in val(node).shape)
    if has_tokens or _sizes(node) not in known:
        raise NotAttention("the column appended to the scores is not of one sink per head")
    return Sinks(heads, node, casts, in_front, nodes)


def _sizes(node: Node) -> list[int]:
    """Sizes that are neither one nor a number of tokens."""
    return [size for size in val(node).shape if isinstance(size, int) and size != 1]


def _only_for_size(node: Node) -> set[Node]:
    """Cuts of the scores that tell an expansion or a filling its size."""
    like = node.args[1] if is_call(node, aten.expand_as.default) else node.args[0]
    found = set()
    while is_call(like, aten.slice.Tensor, aten.select.int, *VIEWS):
        found.add(like)
        like = like.args[0]
    is_made_like = is_call(node, aten.expand_as.default, *_FILLS, *_FILLS_WITH)
    return found if is_made_like else set()
