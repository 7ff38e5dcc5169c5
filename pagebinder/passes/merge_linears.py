"""Linear layers that read the same x become one op, without touching their weights.

Matches:
    y0 = linear(x, W0, b0);  y1 = linear(x, W1, b1); ...        op of ours, all with a bias or all without
Replaces with:
    y0, y1, ... = linears(x, [W0, W1, ...], [b0, b1, ...])

x is packed once and one parallel region walks all the weights: fewer calls, and one wait for the slowest thread.
Weights stay where they are, so they are still shared with the source model.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import arg, calls, describe, finish, insert_call, source_line, val
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "linears"
LINEAR = torch.ops.pagebinder.linear.default


def merge_linears(gm: GraphModule) -> PassResult:
    """Merge siblings at the place of the first; a linear layer that is the only one of its x is left in silence."""
    result = PassResult(name="merge_linears")
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    siblings: dict[Node, list[Node]] = {}
    for node in calls(gm.graph, LINEAR):
        siblings.setdefault(node.args[0], []).append(node)
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


def _bias(node: Node):
    return arg(node, 2, "bias")


def _reason_against(nodes: list[Node], order: dict[Node, int]) -> str | None:
    if len({_bias(n) is None for n in nodes}) > 1:
        return "some of the layers that read this value have a bias, and some have not"
    operands = [o for n in nodes for o in (n.args[1], _bias(n)) if o is not None]
    if any(o.op != "get_attr" and order[o] > order[nodes[0]] for o in operands):
        return "a weight is computed after the first of the layers"
    return None


def _merge(gm: GraphModule, nodes: list[Node]) -> Node:
    first = nodes[0]
    operands = [n.args[1] for n in nodes], [b for n in nodes if (b := _bias(n)) is not None]
    _before(first, *operands[0], *operands[1])
    merged = insert_call(
        gm.graph, first, torch.ops.pagebinder.linears.default, (first.args[0], *operands),
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


def _before(place: Node, *parameters: Node) -> None:
    """Fetch parameters before `place`, wherever the graph fetched them."""
    earlier = set()
    for node in place.graph.nodes:
        if node is place:
            break
        earlier.add(node)
    for node in parameters:
        if node not in earlier:
            place.prepend(node)
