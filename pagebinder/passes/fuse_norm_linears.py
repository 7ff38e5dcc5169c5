"""RMSNorm in one op with the linear layers that alone read its result; for GPUs, where one row's norm is a launch.

Matches:
    y, h = add_rms_norm(x, residual, w, eps, tail)              or y = rms_norm(x, w, eps, tail)
    ... = linears(y, weights, biases) | gated_linear(y, Wg, Wu, bg, bu, activation) | linear(y, W, b)     ops of ours
Replaces with:
    ..., h = norm_linears(x, residual, w, weights, biases, eps, tail, activation)

The op rounds where the two round.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import arg, calls, describe, finish, insert_call, is_call, source_line, val
from pagebinder.passes.linear_calls import LINEAR, fetch_before
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "norm_linears"

_ours = torch.ops.pagebinder
ADD_NORM, NORM = _ours.add_rms_norm.default, _ours.rms_norm.default
LINEARS, GATED = _ours.linears.default, _ours.gated_linear.default


def fuse_norm_linears(gm: GraphModule) -> PassResult:
    """Rewrite every norm before layers; one that something else reads is refused with what was found."""
    result = PassResult(name="fuse_norm_linears")
    for norm in calls(gm.graph, ADD_NORM, NORM):
        normed = _part(norm, 0) if is_call(norm, ADD_NORM) else norm
        reason = _reason_against(norm, normed)
        if reason:
            where = {"source_line": source_line(norm), **describe(norm)}
            result.refusals.append(Refusal(pattern=PATTERN, reason=reason, **where))
            continue
        result.matches.append(Match(pattern=PATTERN, **describe(_fuse(gm, norm, normed))))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _part(node: Node, index: int) -> Node | None:
    """The node that takes a result of a call."""
    return next((u for u in node.users if is_call(u, operator.getitem) and u.args[1] == index), None)


def _reason_against(norm: Node, normed: Node | None) -> str | None:
    if normed is None or len(normed.users) != 1:
        return "the normalised value is read by more than one op, or by none"
    layers = next(iter(normed.users))
    if not is_call(layers, LINEAR, LINEARS, GATED) or layers.args[0] is not normed:
        return "the normalised value is not read by linear layers of ours"
    if val(normed).dtype != val(norm.args[0]).dtype:
        return "the norm's result is of another dtype than x"
    if is_call(layers, GATED) and (arg(layers, 3, "gate_bias") is None) != (
        arg(layers, 4, "up_bias") is None
    ):
        return "one half of the gate has a bias and the other has not"
    if any(p.op != "get_attr" for part in _parameters(layers) for p in part):
        return "a weight or a bias is computed"
    return None


def _fuse(gm: GraphModule, norm: Node, normed: Node) -> Node:
    layers, has_sum = next(iter(normed.users)), is_call(norm, ADD_NORM)
    x, residual = norm.args[:2] if has_sum else (norm.args[0], None)
    weights, biases = _parameters(layers)
    results = {0: layers}
    if is_call(layers, LINEARS):
        results = {node.args[1]: node for node in layers.users}
    values = list(val(layers)) if is_call(layers, LINEARS) else [val(layers)]
    total = _part(norm, 1) if has_sum else None
    if total is not None:
        results[len(values)] = total
    values += [val(norm)[1]] if has_sum else []
    operands = (x, residual, arg(norm, 1 + has_sum, "weight"), weights, biases)
    options = {**norm.kwargs, **layers.kwargs}
    # At the place of the norm, as the sum may be read before the layers are.
    fetch_before(norm, *weights, *biases)
    fused = insert_call(gm.graph, norm, _ours.norm_linears.default, operands, options, value=values)
    for index, old in results.items():
        part = insert_call(gm.graph, norm, operator.getitem, (fused, index), value=values[index])
        part.meta.update({k: old.meta[k] for k in ("nn_module_stack", "stack_trace") if k in old.meta})
        old.replace_all_uses_with(part)
    for old in dict.fromkeys((*results.values(), layers, normed, norm)):
        gm.graph.erase_node(old)
    return fused


def _parameters(layers: Node) -> tuple[list[Node], list[Node]]:
    """(weights, biases)."""
    if is_call(layers, LINEARS):
        return list(layers.args[1]), list(layers.args[2])
    names = ("gate_bias", "up_bias") if is_call(layers, GATED) else ("bias",)
    num_weights = len(names)
    biases = [arg(layers, 1 + num_weights + i, name) for i, name in enumerate(names)]
    return list(layers.args[1 : 1 + num_weights]), [bias for bias in biases if bias is not None]
