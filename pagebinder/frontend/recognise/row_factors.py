"""Factors of whole rows, of scores or of weights, go to where one row is one query.

Matches:
    scores [.., H, T, T] * f,  weights [.., H, T, T] * f          f: [H, 1, 1], [.., T, 1], a tensor of one number
Replaces with:
    (q * f) @ k^T                                                 temperatures of heads, of queries, of positions
    (weights @ v) * f

No key has a factor of its own: f has one column. What it depends on is the audit's business, as of all that is a
query's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.mask_values import ancestors, is_size
from pagebinder.frontend.recognise.operands import NotAttention, Operand, in_order
from pagebinder.graph_tools import aten, insert_call, val


@dataclass(frozen=True)
class RowFactor:
    """What `scores` (or weights) are multiplied with, or divided by; a literal, too."""

    factor: Node | float
    divides: bool
    scores: Node


def is_of_rows(factor, scores: Node, tainted: set[Node]) -> bool:
    """Is it one number for each row of [.., T, T], for each head, or for all (a literal, too)?

    One that is for no row must not depend on the tokens or on their number: no audit of rows would see that.
    """
    if isinstance(factor, (int, float)):
        return math.isfinite(factor)
    if not isinstance(factor, Node) or not isinstance(factor.meta.get("val"), torch.Tensor):
        return False
    *leading, rows, columns = (1, 1, *val(factor).shape)[-max(2, val(factor).dim()) :]
    if columns != 1 or any(isinstance(size, torch.SymInt) for size in (columns, *leading)):
        return False
    if val(factor).dim() > val(scores).dim():
        return False
    if isinstance(rows, torch.SymInt):
        return rows.node.expr == val(scores).shape[-2].node.expr
    return factor not in tainted and not any(map(counts_tokens, ancestors(factor)))


def counts_tokens(node: Node) -> bool:
    """A size, or a value with an entry for each token: what is summed over those depends on their number."""
    value = node.meta.get("val")
    return is_size(node) or any(isinstance(size, torch.SymInt) for size in getattr(value, "shape", ()))


def multiplied(
    gm: GraphModule, where: Node, x: Operand, factors: list[RowFactor], like: Node, labels: list[str]
) -> Operand:
    """`x` times the factors, in its dtype, before `where`. Dimension i of `like`, which is of the shape of what they
    were multiplied with, is called labels[i]: the last one is the columns, which `x` has under its own name.

    Raises:
        NotAttention: scores or weights have another shape where a factor is applied than in the product.
    """
    for row_factor in factors:
        factor, op = row_factor.factor, aten.div.Tensor if row_factor.divides else aten.mul.Tensor
        if isinstance(factor, Node):
            if _sizes(row_factor.scores) != _sizes(like):
                raise NotAttention("the scores are reshaped between their product and a factor of their rows")
            factor = in_order(gm, where, factor, labels, x.labels)
        node = insert_call(gm.graph, where, op, (x.node, factor))
        if val(node).dtype is not val(x.node).dtype:
            node = insert_call(gm.graph, where, aten.to.dtype, (node, val(x.node).dtype))
        x = Operand(node, x.labels, x.factor)
    return x


def _sizes(node: Node) -> list[str]:
    return [str(size) for size in val(node).shape]
