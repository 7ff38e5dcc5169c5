"""What follows the last op on all tokens computes only the rows whose logits are asked for.

    all T tokens                                    one of the 1,000 tokens of a prompt
    attention -> linear -> + -> norm -> gated linear -> linear -> + -> norm -> rows -> LM head
    attention -> rows -> linear -> + -> norm -> gated linear -> linear -> + -> norm -> LM head
                 x -> rows -------'

Matches:
    index_select(f(a, b, ...), dim, logits_rows)
Replaces with:
    f(index_select(a, dim_a, logits_rows), index_select(b, dim_b, logits_rows), ...)

f is all ops up from the logits that treat each token alone and that nobody else reads; if no linear layer or experts
are among them, nothing changes. Ops that look across tokens (attention, recurrences, the scale of a whole tensor) end
it: they, and what comes before them, see every token.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.graph_tools import (
    CASTS,
    arg,
    aten,
    calls,
    describe,
    finish,
    insert_call,
    is_call,
    set_val,
    val,
)
from pagebinder.passes.gather_logits import LOGITS_ROWS
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "narrow_rows"

_ours = torch.ops.pagebinder
LAYERS = (
    aten.linear.default, _ours.linear.default, _ours.linears.default, _ours.gated_linear.default,
    _ours.quantized_linear.default, _ours.quantized_linears.default, _ours.quantized_gated_linear.default,
    _ours.moe_experts.default, _ours.moe_routed_experts.default,
    _ours.quantized_moe_experts.default, _ours.quantized_moe_routed_experts.default,
)  # fmt: skip
# The last dimension of each operand that has tokens is not theirs; neither is any that the op looks across.
OVER_CHANNELS = (
    *LAYERS, aten.layer_norm.default, _ours.rms_norm.default, _ours.add_rms_norm.default,
    _ours.gated_activation.default, _ours.hyper_connection.default, _ours.hyper_mix.default, _ours.hyper_head.default,
)  # fmt: skip
# Ops along dimensions of their first operand: where they name them, and which they take if they do not.
ALONG_DIMS = {
    aten.softmax.int: (1, None), aten._softmax.default: (1, None), aten.sum.dim_IntList: (1, None),
    aten.mean.dim: (1, None), aten.topk.default: (2, -1), aten.gather.default: (1, None), aten.select.int: (1, None),
}  # fmt: skip
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def narrow_rows(gm: GraphModule) -> PassResult:
    """Move the selection of logits' rows up as far as tokens do not meet."""
    result = PassResult(name="narrow_rows")
    for gather in calls(gm.graph, aten.index_select.default):
        x, _, rows = gather.args
        if rows.op != "placeholder" or rows.target != LOGITS_ROWS:
            continue
        tokens = val(x).shape[gather.args[1]]
        if isinstance(tokens, torch.SymInt):
            _narrow(gm, gather, tokens.node.expr, result)
    finish(gm)
    return result


def _narrow(gm: GraphModule, gather: Node, tokens: sympy.Expr, result: PassResult) -> None:
    narrowed, edge = _ops_of_rows(gm, gather, tokens)
    layers = sum(is_call(n, *LAYERS) for n in narrowed)
    if not layers:
        names = ", ".join(n.name for n in edge)
        reason = f"no linear layer or experts between {names} and the logits treats each token alone"
        result.refusals.append(Refusal(pattern=PATTERN, reason=reason, **describe(gather)))
        return
    rows, described = gather.args[2], describe(gather)
    selected: dict[Node, Node] = {}
    for node in narrowed:  # in the graph's order
        for operand in node.all_input_nodes:
            if operand in edge and operand not in selected:
                args = (operand, _place(val(operand), tokens), rows)
                selected[operand] = insert_call(gm.graph, node, aten.index_select.default, args)
        node.args = map_arg(node.args, lambda n: selected.get(n, n))
        node.kwargs = map_arg(node.kwargs, lambda n: selected.get(n, n))
        if is_call(node, *VIEWS):
            node.update_arg(1, _sizes_without(node, tokens))
        set_val(node)
    gather.replace_all_uses_with(gather.args[0])
    gm.graph.erase_node(gather)
    detail = f"{layers} op(s) with large weights among {len(narrowed)} compute the rows of logits only"
    result.matches.append(Match(pattern=PATTERN, detail=detail, **described))
    result.changed = True


def _ops_of_rows(gm: GraphModule, gather: Node, tokens: sympy.Expr) -> tuple[list[Node], list[Node]]:
    """The ops that can compute selected rows only, and what they read of all tokens, in the graph's order."""
    reached, inside, edge = {gather.args[0]}, {gather}, set()
    for node in reversed(gm.graph.nodes):
        if node not in reached:
            continue
        if inside.issuperset(node.users) and _treats_tokens_alone(node, tokens):
            inside.add(node)
            reached.update(n for n in node.all_input_nodes if _has_tokens(n, tokens))
        elif isinstance(val(node), torch.Tensor):
            edge.add(node)
        else:  # rows are selected of each of its results
            results = inside.intersection(node.users)
            inside, edge = inside - results, edge | results
    inside.remove(gather)
    return [n for n in gm.graph.nodes if n in inside], [n for n in gm.graph.nodes if n in edge]


def _treats_tokens_alone(node: Node, tokens: sympy.Expr) -> bool:
    """Does a row of the result depend on the same row of each operand that has rows, and on nothing else of them?"""
    if node.op != "call_function":
        return False
    if is_call(node, *VIEWS):
        return _keeps_tokens(node, tokens)
    if is_call(node, operator.getitem):
        return is_call(node.args[0], *OVER_CHANNELS, *ALONG_DIMS)
    if any(not isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes):
        return False
    operands = [n for n in node.all_input_nodes if _has_tokens(n, tokens)]
    tensors = [tensor for n in (*operands, node) for tensor in _tensors(n)]
    places = [_place(tensor, tokens) for tensor in tensors]
    if None in places or not operands:
        return False
    if is_call(node, *OVER_CHANNELS):
        return all(place < tensor.dim() - 1 for place, tensor in zip(places, tensors, strict=True))
    if is_call(node, *ALONG_DIMS):
        position, default = ALONG_DIMS[node.target]
        dims, first = arg(node, position, "dim", default), val(node.args[0])
        dims, place = dims if isinstance(dims, (list, tuple)) else [dims], _place(first, tokens)
        if not dims or not all(isinstance(dim, int) for dim in dims) or place is None:
            return False
        return place not in [dim % first.dim() for dim in dims]
    if is_call(node, aten.unsqueeze.default):
        return True
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and not node.target._schema.is_mutable
    from_the_right = {place - tensor.dim() for place, tensor in zip(places, tensors, strict=True)}
    return (pointwise or is_call(node, *CASTS)) and len(from_the_right) == 1


def _tensors(node: Node) -> list[torch.Tensor]:
    """What a node stands for, if that is a tensor or several."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def _has_tokens(node: Node, tokens: sympy.Expr) -> bool:
    """Does a tensor, or one of an op's several, have a size that the number of tokens is part of?"""
    sizes = (size for tensor in _tensors(node) for size in tensor.shape)
    return any(isinstance(size, torch.SymInt) and size.node.expr.has(tokens) for size in sizes)


def _place(tensor: torch.Tensor, tokens: sympy.Expr) -> int | None:
    """The dimension of tokens; None if there is not exactly one, or another that depends on their number."""
    places = [i for i, size in enumerate(tensor.shape) if isinstance(size, torch.SymInt)]
    exact = [i for i in places if tensor.shape[i].node.expr == tokens]
    return exact[0] if len(places) == len(exact) == 1 else None


def _keeps_tokens(node: Node, tokens: sympy.Expr) -> bool:
    """Is a view's dimension of tokens the first but for ones, before and after it, and its other sizes known?"""
    before, after = val(node.args[0]), val(node)
    places = _place(before, tokens), _place(after, tokens)
    if None in places or not _are_ones(before.shape[: places[0]]) or not _are_ones(after.shape[: places[1]]):
        return False
    others = [size for i, size in enumerate(node.args[1]) if i != places[1]]
    return all(isinstance(size, int) and size >= 0 for size in others)


def _are_ones(sizes: Iterable) -> bool:
    return all(isinstance(size, int) and size == 1 for size in sizes)


def _sizes_without(node: Node, tokens: sympy.Expr) -> list:
    """A view's sizes, that of tokens left open."""
    place = _place(val(node), tokens)
    return [-1 if i == place else size for i, size in enumerate(node.args[1])]
