"""The router of a mixture of experts as it stands in a graph: from what a mixture is given, back to the logits.

    scores = softmax(logits, -1) | sigmoid(logits) | any value [T, E]
    rated  = scores + bias                                                        or the scores
    rated  = masked_fill(rated, ~expand(scatter(zeros [T, G], topk(group scores))), -inf | 0)      or without groups
    value, ids = topk(rated, K)
    w = value | gather(scores, 1, ids);   w / clamp(sum(w, -1) + epsilon, least) | softmax(w);   w * scale;   cast

Each step may be left out where a model has none. Everything up to the last cast is float32, but for a softmax of
chosen logits, which may be computed in the model's dtype.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from pagebinder.custom_ops.moe.router import Router
from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, is_call, val

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
NOTS = (aten.bitwise_not.default, aten.logical_not.default)
ZEROS = (aten.zeros_like.default, aten.zeros.default)
LAST = (-1, 1)


class NotThisRouter(Exception):
    """Why a mixture's experts or weights are not those of a router as above."""


@dataclass(frozen=True)
class RoutedSite:
    """logits [T, E] (scores, where `router.score` is "logits"), the bias [E] of the choice, and the rest as data."""

    logits: Node
    bias: Node | None
    router: Router


def routed_site(ids: Node, weights: Node) -> RoutedSite:
    """The router behind the ids [T, K] and weights [T, K] that a mixture is given.

    Raises:
        NotThisRouter: with the reason.
    """
    choice = _output_of(_plain(ids), 1)
    _require(is_call(choice, aten.topk.default), "its experts are not the best of some scores")
    largest = arg(choice, 3, "largest", True)
    _require(
        largest and _is_rows(choice, arg(choice, 2, "dim", -1)), "its experts are not the best of each row"
    )
    weighed = _weights(weights, choice)
    groups, rated = _groups(_plain(choice.args[0]))
    scores, bias = _bias(rated)
    source = weighed.pop("source")
    is_same = weighed["weigh_rated"] or _plain(source) is scores
    _require(is_same, "its weights are not gathered from the scores that choose")
    score, logits = _score(scores)
    of_scores = weighed["normalised"] == "sum" or (
        weighed["normalised"] == "none" and weighed["scale"] != 1.0
    )
    arithmetic = bias is not None or groups or of_scores
    _require(
        val(scores).dtype is torch.float32 or not arithmetic, "its scores are rounded before they are used"
    )
    router = Router(
        top_k=choice.args[1], score=score, sorted_choice=arg(choice, 4, "sorted", True), **groups, **weighed
    )
    return RoutedSite(logits, bias, router)


def _weights(node: Node, choice: Node) -> dict:
    """The fields of a Router that say how weights come from what was chosen, and `source`, where it is gathered."""
    dtype = val(node).dtype
    found = {"weight_dtype": _narrow(dtype), "normalised": "none", "scale": 1.0}
    while is_call(node, *CASTS, *IDENTITIES) and val(node).dtype is dtype:
        node = node.args[0]
    if is_call(node, aten.mul.Tensor) and isinstance(node.args[1], (int, float)):
        node, found["scale"] = _plain(node.args[0]), float(node.args[1])
    if is_call(node, aten.div.Tensor):
        found |= {"normalised": "sum", **_divisor(node.args[1], node.args[0])}
        node = node.args[0]
    elif is_call(node, aten.softmax.int):
        _require(_is_rows(node, node.args[1]), "the softmax of its weights is not along them")
        found |= {"normalised": "softmax", "softmax_dtype": _narrow(val(node).dtype)}
        _require(
            found["scale"] == 1.0 or val(node).dtype is torch.float32, "its weights are scaled after rounding"
        )
        node = node.args[0]
    node = _widened(node)
    if _output_of(node, 0) is choice:
        return found | {"weigh_rated": True, "source": None}
    is_gathered = is_call(node, aten.gather.default) and node.args[1] in LAST
    if not is_gathered or _output_of(_plain(node.args[2]), 1) is not choice:
        raise NotThisRouter(f"its weights come from {_name(node)}, which is not understood")
    return found | {"weigh_rated": False, "source": node.args[0]}


def _divisor(denominator: Node, value: Node) -> dict:
    """e and l of clamp(sum(value) + e, l)."""
    epsilon = least = 0.0
    if is_call(denominator, aten.clamp.default, aten.clamp_min.default):
        least = arg(denominator, 1, "min")
        _require(
            isinstance(least, (int, float)) and least > 0 and arg(denominator, 2, "max") is None,
            "the sum of its weights has other bounds than a least positive one",
        )
        denominator = denominator.args[0]
    if is_call(denominator, aten.add.Tensor) and isinstance(denominator.args[1], (int, float)):
        _require(not denominator.kwargs, "the sum of its weights is added with a factor")
        denominator, epsilon = denominator.args[0], float(denominator.args[1])
    is_sum = is_call(denominator, aten.sum.dim_IntList) and denominator.args[0] is value
    if not is_sum or not set(denominator.args[1]) <= set(LAST) or not arg(denominator, 2, "keepdim", False):
        raise NotThisRouter(f"its weights are divided by {_name(denominator)}, not by their sum")
    return {"epsilon": epsilon, "least_sum": float(least)}


def _groups(rated: Node) -> tuple[dict, Node]:
    """The fields of a Router that say which groups may be chosen from, {} without; and the ratings before that."""
    if not is_call(rated, aten.masked_fill.Scalar):
        return {}, rated
    rated, mask, fill = rated.args
    _require(fill in (0.0, float("-inf")), f"experts that may not be chosen rate {fill}")
    best = _best_groups(mask, val(rated).shape[1])
    group_scores = best.args[0]
    name, parts = _group_score(group_scores)
    _require(is_call(parts, *VIEWS) and parts.args[0] is rated, "groups are not rated by their experts")
    num_groups, size = val(parts).shape[1:]
    _require(val(group_scores).shape[1] == num_groups, "groups are not neighbours")
    _require(num_groups * size == val(rated).shape[1], "groups are not all of the experts")
    return {
        "num_groups": int(num_groups),
        "top_groups": best.args[1],
        "group_score": name,
        "other_groups_zero": fill == 0.0,
    }, rated


def _best_groups(mask: Node, num_experts: int) -> Node:
    """The topk [T, G] of ~expand(scatter(zeros [T, G], 1, its ids, 1)) as a mask [T, E]."""
    reason = "the mask over its experts is not that of the best groups"
    _require(is_call(mask, *NOTS), reason)
    spread = _plain(mask.args[0])
    _require(is_call(spread, *VIEWS) and val(spread).shape[1] == num_experts, reason)
    spread = _plain(spread.args[0])
    _require(is_call(spread, aten.expand.default) and val(spread).dim() == 3, reason)
    column = spread.args[0]
    _require(is_call(column, aten.unsqueeze.default) and column.args[1] in (-1, 2), reason)
    marks = _plain(column.args[0])
    _require(is_call(marks, aten.scatter.value) and marks.args[1] in LAST and marks.args[3] == 1, reason)
    _require(is_call(marks.args[0], *ZEROS), reason)
    best = _output_of(marks.args[2], 1)
    _require(is_call(best, aten.topk.default) and _is_rows(best, arg(best, 2, "dim", -1)), reason)
    _require(arg(best, 3, "largest", True), reason)
    return best


def _group_score(node: Node) -> tuple[str, Node]:
    """(a name in GROUP_SCORES, the ratings [T, G, N]) of what rates groups."""
    if is_call(node, aten.amax.default) and set(arg(node, 1, "dim", ())) <= {-1, 2}:
        return "best", node.args[0]
    largest = _output_of(node, 0)
    if is_call(largest, aten.max.dim) and largest.args[1] in (-1, 2):
        return "best", largest.args[0]
    if is_call(node, aten.sum.dim_IntList) and set(node.args[1]) <= {-1, 2}:
        two = _output_of(node.args[0], 0)
        if is_call(two, aten.topk.default) and two.args[1] == 2 and arg(two, 2, "dim", -1) in (-1, 2):
            _require(arg(two, 3, "largest", True), "groups are rated by their worst experts")
            return "best_two", two.args[0]
    raise NotThisRouter(f"groups are rated by {_name(node)}, which is not understood")


def _bias(rated: Node) -> tuple[Node, Node | None]:
    """(scores, bias [E] or None) of scores + bias."""
    if not is_call(rated, aten.add.Tensor) or rated.kwargs or not isinstance(rated.args[1], Node):
        return rated, None
    scores, bias = rated.args if val(rated.args[0]).dim() == 2 else reversed(rated.args)
    fits = val(bias).shape == val(rated).shape[1:] and val(bias).is_floating_point()
    return (_plain(scores), bias) if fits and val(bias).dtype.itemsize <= 4 else (rated, None)


def _score(scores: Node) -> tuple[str, Node]:
    """(a name in SCORES, what it is computed from); values of another origin are taken as they are."""
    if val(scores).dtype is torch.float32:
        if is_call(scores, aten.softmax.int) and _is_rows(scores, scores.args[1]):
            return "softmax", _widened(scores.args[0])
        if is_call(scores, aten.sigmoid.default):
            return "sigmoid", _widened(scores.args[0])
    return "logits", _widened(scores)


def _is_rows(node: Node, dim: int) -> bool:
    """Is `dim` the last one of a matrix?"""
    return val(node.args[0]).dim() == 2 and dim in LAST


def _output_of(node, index: int) -> Node | None:
    """The call whose output number `index` this is."""
    is_output = is_call(node, operator.getitem) and node.args[1] == index
    return node.args[0] if is_output else None


def _plain(node: Node) -> Node:
    """Without casts of whole numbers and masks, and copies."""
    while is_call(node, *CASTS, *IDENTITIES):
        kinds = {val(n).dtype.is_floating_point for n in (node, node.args[0])}
        if kinds == {True} and val(node).dtype is not val(node.args[0]).dtype:
            return node
        node = node.args[0]
    return node


def _widened(node: Node) -> Node:
    """Without casts to float32 of a narrower dtype, which lose nothing, and copies."""
    while is_call(node, *CASTS, *IDENTITIES):
        before = val(node.args[0]).dtype
        if before is not val(node).dtype and (val(node).dtype is not torch.float32 or before.itemsize > 4):
            return node
        node = node.args[0]
    return node


def _narrow(dtype: torch.dtype) -> torch.dtype | None:
    """As a Router says it: None for float32."""
    return None if dtype is torch.float32 else dtype


def _name(node) -> str:
    return str(getattr(node, "target", node))


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotThisRouter(reason)
