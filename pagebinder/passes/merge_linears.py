"""Linear layers that read the same x become one op, without touching their weights.

Matches:
    y0 = linear(x, W0, b0);  y1 = linear(x, W1, b1); ...        ops of ours, all with a bias or all without,
                                                                or quantized_linear with codes of one format
Replaces with:
    y0, y1, ... = linears(x, [W0, W1, ...], [b0, b1, ...])      or quantized_linears(x, codes, scales, biases)

x is packed once and one parallel region walks all the weights: fewer calls, and one wait for the slowest thread.
Weights stay where they are, so they are still shared with the source model.
"""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from pagebinder.graph_tools import calls, describe, finish, insert_call, source_line, val
from pagebinder.passes.linear_calls import (
    LINEAR,
    QUANTIZED,
    LinearCall,
    fetch_before,
    linear_call,
    reason_against_joining,
)
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "linears"


def merge_linears(gm: GraphModule) -> PassResult:
    """Merge siblings at the place of the first; a linear layer that is the only one of its x is left in silence."""
    result = PassResult(name="merge_linears")
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    siblings: dict[tuple[Node, str | None], list[Node]] = {}
    for node in calls(gm.graph, LINEAR, QUANTIZED):
        call = linear_call(node)
        siblings.setdefault((call.x, call.format), []).append(node)
    for nodes in siblings.values():
        if len(nodes) < 2:
            continue
        reason = _reason_against(nodes, order)
        if reason:
            where = {"source_line": source_line(nodes[0]), **describe(nodes[0])}
            result.refusals.append(Refusal(pattern=PATTERN, reason=reason, **where))
            continue
        merged = _merge(gm, nodes)
        result.matches.append(Match(pattern=PATTERN, detail=f"{len(nodes)} layers", **describe(merged)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _reason_against(nodes: list[Node], order: dict[Node, int]) -> str | None:
    layers = [linear_call(n) for n in nodes]
    if len({layer.bias is None for layer in layers}) > 1:
        return "some of the layers that read this value have a bias, and some have not"
    if any(o.op != "get_attr" and order[o] > order[nodes[0]] for o in _parameters(layers)):
        return "a weight is computed after the first of the layers"
    return reason_against_joining(layers[0], PATTERN)


def _parameters(layers: list[LinearCall]) -> list[Node]:
    return [o for layer in layers for o in (*layer.weight, layer.bias) if o is not None]


def _merge(gm: GraphModule, nodes: list[Node]) -> Node:
    first, layers = nodes[0], [linear_call(n) for n in nodes]
    fetch_before(first, *_parameters(layers))
    parts = [list(part) for part in zip(*(layer.weight for layer in layers))]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    merged = insert_call(
        gm.graph, first, layers[0].joined_op(PATTERN), (layers[0].x, *parts, biases), layers[0].options,
        value=[val(n) for n in nodes],
    )  # fmt: skip
    if "nn_module_stack" in merged.meta:
        merged.meta["nn_module_stack"] = _shared_module(nodes)
    for index, node in enumerate(nodes):
        part = insert_call(gm.graph, first, operator.getitem, (merged, index), value=val(node))
        part.meta.update({k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta})
        node.replace_all_uses_with(part)
    for node in nodes:
        gm.graph.erase_node(node)
    return merged


def _shared_module(nodes: list[Node]) -> dict:
    """The innermost module that all of them are in, with those around it."""
    stacks = [list(n.meta.get("nn_module_stack", {}).items()) for n in nodes]
    return dict(item for item, *others in zip(*stacks) if all(other == item for other in others))
