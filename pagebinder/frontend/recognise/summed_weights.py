"""Weights that are a sum or difference of softmaxes become a sum of attentions.

Matches:
    (w1 - lambda * w2) @ v            w: softmaxes over tokens, times anything; casts and scalings of the sum
Replaces with:
    w1 @ v - (lambda * w2) @ v        differential attention (Ye et al., 2024)

So each of them is recognised as attention by itself; it is no step of its own.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pagebinder.frontend.recognise.operands import PRODUCTS, SCALINGS, SOFTMAXES, is_of_pairs
from pagebinder.graph_tools import CASTS, IDENTITIES, aten, calls, finish, insert_call, is_call, val

_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_MULTIPLIES = (aten.matmul.default, aten.bmm.default, aten.einsum.default)
# The sum of what these make is what they make of a sum.
_KEEPS = (*CASTS, *IDENTITIES, *SCALINGS, aten.dropout.default)


def distribute_summed_weights(gm: GraphModule) -> bool:
    """Rewrite each product of such a sum; was there one?"""
    found = False
    while sum(_distributed(gm, product) for product in calls(gm.graph, *_MULTIPLIES)):  # sums of sums
        found = True
    if found:
        finish(gm)
    return found


def _distributed(gm: GraphModule, product: Node) -> bool:
    operands = product.args[1] if product.target is aten.einsum.default else product.args
    for weights in operands:
        path, total = [], weights
        while total is not None and not is_call(total, *_SUMS):
            path.append(total)
            total = _before(total)
        if total is None or not _is_sum_of_weights(total) or any(len(n.users) != 1 for n in (*path, total)):
            continue
        parts = [_instead(gm, product, [*reversed(path), product], total, part) for part in total.args]
        made = insert_call(gm.graph, product, total.target, tuple(parts), value=val(product))
        product.replace_all_uses_with(made)
        for node in (product, *path, total):  # a dropout would be kept by torch
            gm.graph.erase_node(node)
        return True
    return False


def _before(node: Node) -> Node | None:
    """The sum may be behind this one: its operand with a row and a column for each token."""
    if not is_call(node, *_KEEPS) or node.kwargs.get("rounding_mode") or not val(node).is_floating_point():
        return None
    of_pairs = [n for n in node.all_input_nodes if is_of_pairs(n)]
    return of_pairs[0] if len(of_pairs) == 1 and of_pairs[0] is node.args[0] else None


def _is_sum_of_weights(total: Node) -> bool:
    terms = [x for x in total.args if is_of_pairs(x)]
    if total.kwargs or len(total.args) != 2 or len(terms) != 2:
        return False
    sizes = {str(list(val(x).shape)) for x in (*terms, total)}
    return len(sizes) == 1 and all(map(_are_weights, terms))


def _are_weights(x: Node) -> bool:
    """Is there a softmax over tokens on the way back, before any product?"""
    queue = [x]
    while queue:
        node = queue.pop()
        if not is_of_pairs(node) or is_call(node, *PRODUCTS):
            continue
        if is_call(node, *SOFTMAXES):
            return node.args[1] in (-1, val(node).dim() - 1)
        queue += node.all_input_nodes
    return False


def _instead(gm: GraphModule, where: Node, path: list[Node], before: Node, part: Node) -> Node:
    """What `path` makes of `part` in the place of `before`."""
    for node in path:
        args = map_arg(node.args, lambda n, old=before, new=part: new if n is old else n)
        before, part = node, insert_call(gm.graph, where, node.target, args, dict(node.kwargs))
    return part
