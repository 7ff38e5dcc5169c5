"""A softmax over tokens that is written out becomes `softmax`, with a column more where its sum has a term more.

Matches:
    e = exp(scores - shift);  w = e / sum(e, -1, keepdim)                          shift: one of a row, or none
    e / (sum(e) + exp(sink - shift))  |  e / (sum(e) + number)                     the number without a shift
    (e @ v) / sum(e, -1, keepdim)                                                  normalised behind the values
    exp(log_softmax(scores, -1))  |  exp(scores - logsumexp(scores, -1, keepdim))
Replaces with:
    w = softmax(scores, -1)
    w = softmax(cat(scores, expand(sink)), -1)[..., :-1]                           sink = log(number)

So what stands around it is recognised as attention, with the sink as an operand. It is no step of its own: weights
that are nearly uniform say nothing about a sink, what attention makes of them does.
"""

from __future__ import annotations

import math

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.recognise.operands import reduces_columns
from pagebinder.graph_tools import aten, calls, describe, finish, insert_call, is_call, source_line, val
from pagebinder.report import Refusal

PATTERN = "attention"
_LOG_SOFTMAXES = (aten.log_softmax.int, aten._log_softmax.default)


class NotThisSoftmax(Exception):
    """Why a quotient by a sum of exponentials is not a softmax as above."""


def rewrite_written_softmaxes(gm: GraphModule) -> tuple[set[Node], list[Refusal]]:
    """Rewrite each quotient of exponentials by their sum over tokens: the softmax nodes made, and what is refused."""
    made, refusals = _rewrite_logarithms(gm), []
    for quotient in calls(gm.graph, aten.div.Tensor):
        node = _normalised_first(gm, quotient)
        exps, total = node.args
        if not is_call(exps, aten.exp.default) or not isinstance(val(exps).shape[-1], torch.SymInt):
            continue
        terms = _terms(total)
        if not any(_is_sum_of(term, exps) for term in terms):
            continue
        try:
            scores, shift = _shifted(exps)
            sink = _sink([term for term in terms if not _is_sum_of(term, exps)], shift)
        except NotThisSoftmax as reason:
            where = {"source_line": source_line(node), **describe(node)}
            refusals.append(Refusal(pattern=PATTERN, reason=str(reason), **where))
            continue
        softmax, weights = _emit(gm, node, scores, sink)
        node.replace_all_uses_with(weights)
        gm.graph.erase_node(node)
        made.add(softmax)
    if made:
        finish(gm)
    return made, refusals


def _normalised_first(gm: GraphModule, node: Node) -> Node:
    """(e @ v) / total -> (e / total) @ v, where the total has the sum of e: the new quotient, else the given one."""
    product, total = node.args
    if not is_call(product, aten.matmul.default, aten.bmm.default) or set(product.users) != {node}:
        return node
    exps, values = product.args
    if not is_call(exps, aten.exp.default) or not any(_is_sum_of(term, exps) for term in _terms(total)):
        return node
    columns = val(total).shape[-1]
    if not isinstance(columns, int) or columns != 1:
        return node
    quotient = insert_call(gm.graph, node, aten.div.Tensor, (exps, total))
    node.replace_all_uses_with(insert_call(gm.graph, node, product.target, (quotient, values)))
    gm.graph.erase_node(node)
    gm.graph.erase_node(product)
    return quotient


def _rewrite_logarithms(gm: GraphModule) -> set[Node]:
    """Softmaxes that are exponentials of their logarithms."""
    made = set()
    for node in calls(gm.graph, aten.exp.default):
        scores = _of_logarithm(node.args[0])
        if scores is None or not isinstance(val(node).shape[-1], torch.SymInt):
            continue
        softmax, weights = _emit(gm, node, scores, None)
        node.replace_all_uses_with(weights)
        gm.graph.erase_node(node)
        made.add(softmax)
    return made


def _of_logarithm(x: Node) -> Node | None:
    """Scores, if x is the logarithm of their softmax."""
    if is_call(x, *_LOG_SOFTMAXES):
        return x.args[0] if x.args[1] in (-1, val(x).dim() - 1) else None
    if not is_call(x, aten.sub.Tensor) or x.kwargs:
        return None
    scores, total = x.args
    is_total = is_call(total, aten.logsumexp.default) and total.args[0] is scores
    return scores if is_total and reduces_columns(total) else None


def _terms(total) -> list:
    """What is added up."""
    if is_call(total, aten.add.Tensor) and not total.kwargs:
        return [term for part in total.args for term in _terms(part)]
    return [total]


def _is_sum_of(term, exps: Node) -> bool:
    return is_call(term, aten.sum.dim_IntList) and term.args[0] is exps and reduces_columns(term)


def _shifted(exps: Node) -> tuple[Node, Node | None]:
    """(scores, shift) of exp(scores - shift)."""
    x = exps.args[0]
    if not is_call(x, aten.sub.Tensor) or x.kwargs or not _is_column(x.args[1]):
        return x, None
    return x.args


def _is_column(value) -> bool:
    return isinstance(value, Node) and val(value).dim() > 0 and isinstance(val(value).shape[-1], int)


def _sink(terms: list, shift: Node | None) -> Node | float | None:
    """What further terms of the sum are exponentials of: at most one is understood."""
    if not terms:
        return None
    if len(terms) > 1:
        raise NotThisSoftmax("its sum has more than one further term")
    (term,) = terms
    if isinstance(term, (int, float)):
        if shift is not None or term <= 0:
            raise NotThisSoftmax(f"{term:g} is added to its sum, which is shifted by the row's maximum")
        return math.log(term)
    if is_call(term, aten.exp.default):
        x = term.args[0]
        if shift is None:
            return x if _is_column(x) else _refuse(term)
        if is_call(x, aten.neg.default) and x.args[0] is shift:
            return 0.0
        if is_call(x, aten.sub.Tensor) and not x.kwargs and x.args[1] is shift:
            sink = x.args[0]
            return sink if _is_column(sink) else float(sink) if not isinstance(sink, Node) else _refuse(term)
    return _refuse(term)


def _refuse(term):
    raise NotThisSoftmax(
        f"its sum has a term that is no exponential of a sink: {getattr(term, 'target', term)}"
    )


def _emit(gm: GraphModule, node: Node, scores: Node, sink: Node | float | None) -> tuple[Node, Node]:
    """(the softmax, the weights: the softmax without the sink's column) in place of a quotient."""

    def call(target, *args) -> Node:
        return insert_call(gm.graph, node, target, args)

    if sink is None:
        softmax = weights = call(aten.softmax.int, scores, -1)
    else:
        first = call(aten.slice.Tensor, scores, -1, 0, 1)
        is_node = isinstance(sink, Node)
        column = (
            call(aten.expand_as.default, sink, first)
            if is_node
            else call(aten.full_like.default, first, sink)
        )
        softmax = call(aten.softmax.int, call(aten.cat.default, [scores, column], -1), -1)
        weights = call(aten.slice.Tensor, softmax, -1, 0, -1)
    if val(weights).dtype is not val(node).dtype:
        weights = call(aten.to.dtype, weights, val(node).dtype)
    return softmax, weights
