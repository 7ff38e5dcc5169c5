"""Rules of the token-mixing audit for mixtures of experts: choosing experts, and running them.

scores [T, E] -> topk -> ids [T, K]      look along experts: `dim` is not the tokens'
gather, scatter along E                  row t of every operand is the same token's
one_hot(ids)                             a class count that is given, not the largest id of the batch
moe_experts, expert_linear               operands [T, ...]; weights that depend on no token
"""

from __future__ import annotations

import torch
from torch.fx import Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.graph_tools import arg, aten

# op -> positions of the operands that have a row for each token; argument 1 is the dimension
_PICKS = {
    aten.gather.default: (0, 2),
    aten.scatter.value: (0, 2),
    aten.scatter.src: (0, 2, 3),
    aten.scatter.reduce: (0, 2, 3),
    aten.scatter.value_reduce: (0, 2),
    aten.scatter_add.default: (0, 2, 3),
    aten.scatter_reduce.two: (0, 2, 3),
}
# op -> (positions of the operands of tokens, positions of weights)
_EXPERTS = {
    torch.ops.pagebinder.moe_experts.default: ((0, 1, 2), (3, 4, 5, 6)),
    torch.ops.pagebinder.expert_linear.default: ((0, 1), (2, 3)),
}
ROUTING = {*_PICKS, *_EXPERTS, aten.one_hot.default}


def reason_against_routing(node: Node) -> str | None:
    """Why a node with a target in ROUTING may relate tokens, or None."""
    if node.target in _EXPERTS:
        return _reason_against_experts(node)
    if node.target is aten.one_hot.default:
        num_classes = arg(node, 1, "num_classes", -1)
        is_given = isinstance(num_classes, int) and num_classes > 0
        return None if is_given else "it counts classes by the largest id of the batch"
    return _reason_against_pick(node)


def _reason_against_experts(node: Node) -> str | None:
    per_token, weights = _EXPERTS[node.target]
    rows = [_token_sizes(node.args[i]) for i in per_token]
    if any(list(row) != [0] for row in rows) or len({row[0] for row in rows}) > 1:
        return "experts take [tokens, ...] of every operand"
    others = [node.args[i] for i in weights if isinstance(node.args[i], Node)]
    return "the weights of experts depend on tokens" if any(map(_token_sizes, others)) else None


def _reason_against_pick(node: Node) -> str | None:
    """Entry [t, ...] of the result reads, or is written to, row t of every operand."""
    operands = [node.args[i] for i in _PICKS[node.target]]
    sizes = [_token_sizes(operand) for operand in operands]
    if node.target is aten.gather.default and not sizes[0]:
        return None  # a table that depends on no token
    dim = node.args[1] % operands[0].meta["val"].dim()
    if any(dim in size for size in sizes):
        return "it works along the token dimension"
    if any(size != sizes[0] for size in sizes):
        return "its operands have rows of different tokens"
    return None


def _token_sizes(node: Node) -> dict:
    """dimension -> number of tokens, of the dimensions that have one."""
    shape = node.meta["val"].shape
    return {dim: size.node.expr for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)}
