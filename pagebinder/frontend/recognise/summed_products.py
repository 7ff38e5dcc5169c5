"""Scores that are a sum of products become one product, of queries and keys side by side.

Matches:
    q1 [.., T, a] @ k1 [.., a, T] + q2 [.., T, b] @ k2 [.., b, T]        MLA: without and with RoPE
    einsum("bshc,btc->bsht", q1, k1) + einsum("bshr,btr->bsht", q2, k2)
Replaces with:
    cat(q1, q2) [.., T, a + b] @ cat(k1, k2) [.., a + b, T]              leading dimensions expanded where they differ
    einsum("bshc,btc->bsht", cat(q1, q2), cat(k1, k2))

So what stands around them is recognised as attention; like a softmax that is written out, it is no step of its own.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import aten, calls, einsum_labels, finish, insert_call, is_call, val

_PRODUCTS = (aten.matmul.default, aten.bmm.default)


def merge_summed_products(gm: GraphModule) -> bool:
    """Rewrite every sum of two products over tokens that nothing else reads; was there one?"""
    found = False
    for node in calls(gm.graph, aten.add.Tensor):
        if node.kwargs or len(node.args) != 2 or node.args[0] is node.args[1]:
            continue
        first, second = node.args
        if is_call(first, aten.einsum.default) and is_call(second, aten.einsum.default):
            found |= _merge_einsums(gm, node)
            continue
        if not all(_is_product(x, node) for x in node.args) or val(first).dtype is not val(second).dtype:
            continue
        leading = list(val(node).shape[:-2])
        (q1, k1), (q2, k2) = (
            [_expanded(gm, node, x, leading) for x in product.args] for product in node.args
        )
        q = insert_call(gm.graph, node, aten.cat.default, ([q1, q2], -1))
        k = insert_call(gm.graph, node, aten.cat.default, ([k1, k2], -2))
        merged = insert_call(gm.graph, node, aten.matmul.default, (q, k), value=val(node))
        node.replace_all_uses_with(merged)
        gm.graph.erase_node(node)
        found = True
    if found:
        finish(gm)
    return found


def _merge_einsums(gm: GraphModule, node: Node) -> bool:
    """Two that differ in the letter that is summed over, and in its size, alone."""
    first, second = node.args
    labels = [einsum_labels(x) for x in node.args]
    if any(set(x.users) != {node} or len(x.args[1]) != 2 for x in node.args) or None in labels:
        return False
    summed = [sorted(set(a) & set(b) - set(result)) for (a, b), result in labels]
    if (
        any(len(letters) != 1 or not letters[0] for letters in summed)
        or "." in first.args[0] + second.args[0]
    ):
        return False
    as_first = {summed[1][0]: summed[0][0]}
    (q1, k1), (q2, k2) = first.args[1], second.args[1]
    alike = [[[as_first.get(x, x) for x in of] for of in labels[1][0]], labels[1][1]] == [
        *map(list, labels[0])
    ]
    sizes = [_others(x, of.index(letters[0])) for (one, _), letters, product in zip(labels, summed, node.args)
             for of, x in zip(one, product.args[1])]  # fmt: skip
    if not alike or sizes[:2] != sizes[2:] or val(first).dtype is not val(second).dtype:
        return False
    joined = [
        insert_call(gm.graph, node, aten.cat.default, ([a, b], of.index(summed[0][0])))
        for a, b, of in ((q1, q2, labels[0][0][0]), (k1, k2, labels[0][0][1]))
    ]
    merged = insert_call(gm.graph, node, aten.einsum.default, (first.args[0], joined), value=val(node))
    node.replace_all_uses_with(merged)
    gm.graph.erase_node(node)
    return True


def _others(x: Node, dim: int) -> list[str]:
    """Sizes of all dimensions but one."""
    return [str(size) for d, size in enumerate(val(x).shape) if d != dim]


def _is_product(value, user: Node) -> bool:
    """[.., T, T] of two values whose other dimensions are known."""
    if (
        not is_call(value, *_PRODUCTS)
        or set(value.users) != {user}
        or min(val(x).dim() for x in value.args) < 2
    ):
        return False
    *leading, rows, columns = val(value).shape
    of_tokens = isinstance(rows, torch.SymInt) and isinstance(columns, torch.SymInt)
    return of_tokens and all(isinstance(size, int) for size in leading)


def _expanded(gm: GraphModule, like: Node, x: Node, leading: list[int]) -> Node:
    if list(val(x).shape[:-2]) == leading:
        return x
    return insert_call(gm.graph, like, aten.expand.default, (x, [*leading, -1, -1]))
