"""Scores laid out as [b, rows, heads, keys] become [b, heads, rows, keys], as the rest of the recogniser has them.

Matches:
    einsum("bshd,bthd->bsht", q, k) -> elementwise, masks -> softmax(-1) -> einsum("bsht,bthd->bshd", w, v)
Replaces with:
    einsum("bshd,bthd->bhst", q, k) -> the same, masks with their dimensions exchanged -> softmax(-1)
    -> einsum("bhst,bthd->bshd", w, v)

DeepSeek's inference code is written so. What does not fit is left as it is, for the recogniser to refuse.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.mask_values import is_pointwise
from pagebinder.frontend.recognise.operands import SOFTMAXES
from pagebinder.frontend.token_dims import token_dims
from pagebinder.graph_tools import (
    CASTS,
    IDENTITIES,
    aten,
    calls,
    einsum_labels,
    finish,
    insert_call,
    is_call,
    val,
)

_ORDER = [0, 2, 1, 3]


def exchange_rows_and_heads(gm: GraphModule) -> bool:
    """Rewrite every softmax between two einsums that has rows before heads; was there one?"""
    found = False
    for softmax in calls(gm.graph, *SOFTMAXES):
        if _is_exchanged(softmax) and softmax.args[1] in (-1, 3):
            found |= _exchange(gm, softmax)
    if found:
        finish(gm)
    return found


def _is_exchanged(node: Node) -> bool:
    """[b, rows, heads, keys]"""
    return token_dims(node) == [1, 3] and val(node).dim() == 4


def _exchange(gm: GraphModule, softmax: Node) -> bool:
    chain, behind = _before(softmax), _behind(softmax)
    if chain is None or behind is None:
        return False
    einsum, *steps = chain
    new = {einsum: _with_result(gm, einsum)}
    for node in (*steps, softmax, *behind[:-1]):
        args = [new[a] if a in new else _exchanged(gm, node, a) for a in node.args]
        new[node] = insert_call(gm.graph, node, node.target, tuple(args), dict(node.kwargs))
    last = behind[-1]
    (of_weights, of_values), result = einsum_labels(last)
    equation = f"{''.join(of_weights[d] for d in _ORDER)},{''.join(of_values)}->{''.join(result)}"
    weights, values = last.args[1]
    out = insert_call(gm.graph, last, last.target, (equation, [new[weights], values]), value=val(last))
    last.replace_all_uses_with(out)
    gm.graph.erase_node(last)
    return True


def _before(softmax: Node) -> list[Node] | None:
    """The einsum of the scores and what is done to them, in order; None: something else is there."""
    chain, node = [], softmax.args[0]
    while not is_call(node, aten.einsum.default):
        if not (isinstance(node, Node) and is_pointwise(node) and _is_exchanged(node)):
            return None
        chain.append(node)
        of_scores = [a for a in node.args if isinstance(a, Node) and _is_full(a, node)]
        if len(of_scores) != 1 or set(node.users) - {softmax, *chain}:
            return None
        node = of_scores[0]
    is_ours = _is_exchanged(node) and len(node.users) == 1 and _has_letters(node)
    return [node, *reversed(chain)] if is_ours else None


def _behind(softmax: Node) -> list[Node] | None:
    """What is done to the weights, then the einsum with the values; None: something else is there."""
    found, node = [], softmax
    while len(node.users) == 1:
        (user,) = node.users
        found.append(user)
        if is_call(user, aten.einsum.default):
            return found if _has_letters(user) and user.args[1][0] is node else None
        if not is_call(user, *CASTS, *IDENTITIES, aten.dropout.default):
            return None
        node = user
    return None


def _has_letters(einsum: Node) -> bool:
    labels = einsum_labels(einsum)
    return labels is not None and "." not in einsum.args[0] and len(einsum.args[1]) == len(labels[0]) == 2


def _is_full(operand: Node, node: Node) -> bool:
    """Is it of the result's shape, as scores are and masks (one for all heads) are not?"""
    if not _is_exchanged(operand):
        return False
    return [str(s) for s in val(operand).shape] == [str(s) for s in val(node).shape]


def _with_result(gm: GraphModule, einsum: Node) -> Node:
    inputs, result = einsum_labels(einsum)
    equation = f"{','.join(''.join(x) for x in inputs)}->{''.join(result[d] for d in _ORDER)}"
    return insert_call(gm.graph, einsum, einsum.target, (equation, *einsum.args[1:]), dict(einsum.kwargs))


def _exchanged(gm: GraphModule, like: Node, operand):
    """A mask, or anything else that is broadcast to the scores; numbers as they are."""
    if not isinstance(operand, Node) or not isinstance(operand.meta.get("val"), torch.Tensor):
        return operand
    rank = val(operand).dim()
    if rank < 2:
        return operand
    for _ in range(4 - rank):
        operand = insert_call(gm.graph, like, aten.unsqueeze.default, (operand, 0))
    return insert_call(gm.graph, like, aten.permute.default, (operand, _ORDER))
