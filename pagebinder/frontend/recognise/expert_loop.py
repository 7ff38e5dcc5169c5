"""Loops over alike experts that choose their tokens, as one mixture that reads the experts alone that were chosen.

Matches:
    y = where(any(ids == e, over k), y + f_e(x) * sum(where(ids == e, w, 0), over k), y)      for e = 0, ..., E - 1
    f_e(x) = linear(gated_activation(linear(x, G_e), linear(x, U_e)), D_e)       or linear(a(linear(x, U_e)), D_e)
Replaces with:
    y + moe_experts(x, ids, w, [[G_e, U_e] for each e], [D_e for each e], ...)

That is what `chosen_rows.py` makes of such a loop, in any order of experts. The sum is taken in the order of slots
and not of experts, so it may be rounded otherwise. The weights are copied into one tensor, as the op takes them. A
loop of which that is not known stays as it is: it computes all experts for all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.recognise.expert_layers import ExpertLayers, layers_of
from pagebinder.graph_tools import (
    CASTS,
    IDENTITIES,
    arg,
    aten,
    calls,
    describe,
    finish,
    insert_call,
    insert_derived,
    is_call,
    size_text,
    source_line,
    val,
)
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "expert_loop"
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
          aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim)  # fmt: skip
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


class NotAlike(Exception):
    """Why experts are not one mixture."""


@dataclass(frozen=True)
class _Turn:
    """One turn of a loop: `node` is `before` with what `value` holds added where `ids` [T, K] name `expert`."""

    node: Node
    before: Node
    ids: Node
    expert: int
    value: Node


def recognise_expert_loop(gm: GraphModule) -> PassResult:
    """Rewrite every loop of alike experts; refuse others that choose their tokens by ids."""
    result = PassResult(name="recognise_expert_loop")
    turns = {turn.node: turn for turn in map(_turn, calls(gm.graph, aten.where.self)) if turn is not None}
    inner = {turn.before for turn in turns.values()}
    for last in [turn for node, turn in turns.items() if node not in inner]:
        loop = [last]
        while loop[-1].before in turns:
            loop.append(turns[loop[-1].before])
        try:
            detail = _replace(gm, loop[::-1], len(result.matches))
        except NotAlike as reason:
            where = {"source_line": source_line(last.node), **describe(last.node)}
            result.refusals.append(Refusal(pattern=PATTERN, reason=str(reason), **where))
            continue
        result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(last.node)))
    result.changed = bool(result.matches)
    if result.changed:
        finish(gm)
    return result


def _turn(node: Node) -> _Turn | None:
    """None: a node adds nothing where an expert is chosen."""
    mask, added, before = node.args
    is_column = val(node).dim() == val(mask).dim() == 2 and size_text(val(mask).shape[1]) == "1"
    if not is_column or not is_call(added, aten.add.Tensor) or added.args[0] is not before or added.kwargs:
        return None
    ids, expert = _named(_without_ones(mask))
    if ids is None or not isinstance(added.args[1], Node):
        return None
    return _Turn(node, before, ids, expert, added.args[1])


def _named(mask: Node) -> tuple[Node | None, int]:
    """ids and e of (ids == e), ids [T], or of any(ids == e, over k), ids [T, K]."""
    rank = 2 if is_call(mask, aten.any.dim) and mask.args[1:] == (1,) else 1
    equal = mask.args[0] if rank == 2 else mask
    if not is_call(equal, aten.eq.Scalar) or type(equal.args[1]) is not int:
        return None, 0
    ids, expert = equal.args
    return (ids, expert) if val(ids).dim() == rank and val(ids).dtype is torch.int64 else (None, 0)


def _without_ones(node: Node, *, casts: bool = False) -> Node:
    """Before what only adds or drops dimensions of size one, dropout that drops nothing and, if `casts`, rounding."""
    while True:
        if is_call(node, *_VIEWS):
            sizes = [[n for n in _sizes(x) if n != "1"] for x in (node, node.args[0])]
            if sizes[0] != sizes[1]:
                return node
        elif is_call(node, *CASTS):
            rounds = casts and all(val(x).is_floating_point() for x in (node, node.args[0]))
            if val(node).dtype is not val(node.args[0]).dtype and not rounds:
                return node
        elif is_call(node, aten.dropout.default):
            if arg(node, 2, "train") is not False:
                return node
        elif not is_call(node, *IDENTITIES):
            return node
        node = node.args[0]


def _weighed(turn: _Turn) -> tuple[Node, Node]:
    """(w [T, K], f(x)) of what is added in a turn. Raises NotAlike: it is not one times the other."""
    product = _without_ones(turn.value, casts=True)
    factors = product.args if is_call(product, aten.mul.Tensor) else (None, None)
    for picked, value in (factors, factors[::-1]):
        if not all(isinstance(factor, Node) for factor in factors):
            break
        weights = _picked(picked, turn)
        if weights is not None:
            return weights, value
    raise NotAlike("what is added is not an expert's output times the weight of its slot")


def _picked(node: Node, turn: _Turn) -> Node | None:
    """w of sum(where(ids == e, w, 0), over k) as a column; of one slot, w itself."""
    if val(node).dim() != 2 or val(node).shape[1] != 1:
        return None
    node = _without_ones(node)
    if val(turn.ids).dim() == 1:
        return node if _sizes(node) == _sizes(turn.ids) else None
    if not is_call(node, aten.sum.dim_IntList) or list(node.args[1]) != [1] or node.kwargs:
        return None
    alone = node.args[0]
    if not is_call(alone, aten.where.ScalarOther) or alone.args[2] != 0:
        return None
    chosen, weights = _without_ones(alone.args[0]), _without_ones(alone.args[1])
    same = is_call(chosen, aten.eq.Scalar) and chosen.args == (turn.ids, turn.expert)
    return weights if same and _sizes(weights) == _sizes(turn.ids) else None


def _sizes(node: Node) -> list[str]:
    return [size_text(n) for n in val(node).shape]


def _replace(gm: GraphModule, loop: list[_Turn], number: int) -> str:
    """Put one mixture in the place of a loop, first turn first. Raises NotAlike."""
    last = loop[-1].node
    _check_turns(loop)
    weighed = [_weighed(turn) for turn in loop]
    weights = {w for w, _ in weighed}
    if len(weights) > 1:
        raise NotAlike("its experts are weighed by different values")
    layers = [layers_of(value, _without_ones) for _, value in weighed]
    if None in layers:
        raise NotAlike("an expert is not a linear layer, an activation, and a linear layer of the result")
    first = layers[0]
    if any(other.kind() != first.kind() for other in layers):
        raise NotAlike(
            "its experts differ in what they read, in their activations or in the shapes of their weights"
        )
    rows = [n for n in _sizes(first.x) if n != "1"]
    if rows != _sizes(last) or _sizes(first.x)[-1] != _sizes(last)[-1]:
        raise NotAlike("its experts read other rows than they write")
    if val(first.x).dtype is not val(last).dtype:
        raise NotAlike("its experts compute in another dtype than that of the sum")
    in_order = [layer for _, layer in sorted(zip(loop, layers), key=lambda pair: pair[0].expert)]
    _insert(gm, loop, weights.pop(), in_order, number)
    return f"{len(loop)} experts, {first.gate}"


def _check_turns(loop: list[_Turn]) -> None:
    if len({turn.ids for turn in loop}) > 1:
        raise NotAlike("its experts are chosen by different ids")
    if sorted(turn.expert for turn in loop) != list(range(len(loop))) or len(loop) < 2:
        raise NotAlike("its experts are not numbered 0, 1, 2, ...")
    if any(len(turn.before.users) != 2 for turn in loop[1:]):
        raise NotAlike("a sum over some of its experts is read by something else")


def _insert(
    gm: GraphModule, loop: list[_Turn], weights: Node, layers: list[ExpertLayers], number: int
) -> None:
    graph, last, ids, first = gm.graph, loop[-1].node, loop[0].ids, layers[0]
    constants = [
        _stacked(gm, last, f"expert_loop_{number}_{name}", [layer.parts(name) for layer in layers])
        for name in ("up", "down", "up_bias", "down_bias")
    ]
    if val(ids).dim() == 1:
        ids = insert_call(graph, last, aten.unsqueeze.default, (ids, 1))
        weights = insert_call(graph, last, aten.reshape.default, (weights, [-1, 1]))
    x = first.x
    if val(x).dim() > 2:
        x = insert_call(graph, last, aten.reshape.default, (x, [-1, val(x).shape[-1]]))
    op = torch.ops.pagebinder.moe_experts.default
    options = {"transposed": False, **first.gate.as_options()}
    new = insert_call(graph, last, op, (x, ids, weights, *constants), options)
    if not _is_zero(loop[0].before):
        new = insert_call(graph, last, aten.add.Tensor, (loop[0].before, new))
    last.replace_all_uses_with(new)


def _is_zero(node: Node) -> bool:
    is_full = is_call(node, aten.full.default, aten.full_like.default) and node.args[1] == 0
    return is_full or is_call(node, *_ZEROS)


def _stacked(gm: GraphModule, like: Node, name: str, parts: list[list[Node]]) -> Node | None:
    """A constant [E, ...] of what is joined for each expert; None: there are none."""
    if not parts[0]:
        return None
    times = len(parts[0])

    def stack(*tensors: torch.Tensor) -> torch.Tensor:
        joined = [torch.cat(tensors[i : i + times]) for i in range(0, len(tensors), times)]
        return torch.stack(joined)

    return insert_derived(gm, like, name, stack, [part for of_one in parts for part in of_one])
