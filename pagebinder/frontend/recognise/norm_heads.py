"""Pieces of norms written out: 1 / sqrt(statistic + eps) in its spellings, means over the last dimension, weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from pagebinder.graph_tools import aten, is_call, skip_casts, val

_POWERS = (aten.pow.Tensor_Scalar,)


@dataclass
class Deviation:
    """value / sqrt(variance + eps). `normed` is that quotient, None if the root has other users than one quotient."""

    variance: Node
    eps: float
    value: Node | None
    normed: Node | None


def deviation_of(node: Node) -> Deviation | None:
    """A root of (statistic + literal) and what it divides: rsqrt, sqrt or a power of a half, plus or minus."""
    inverse = is_call(node, aten.rsqrt.default) or (is_call(node, *_POWERS) and node.args[1] == -0.5)
    if (
        not inverse
        and not is_call(node, aten.sqrt.default)
        and not (is_call(node, *_POWERS) and node.args[1] == 0.5)
    ):
        return None
    total = node.args[0]
    if not is_sum_with_literal(total):
        return None
    found = Deviation(total.args[0], float(total.args[1]), None, None)
    root = node
    users = list(root.users)
    if not inverse and len(users) == 1 and is_call(users[0], aten.reciprocal.default):
        root, inverse = users[0], True
        users = list(root.users)
    if len(users) != 1:
        return found
    user = users[0]
    if inverse and is_call(user, aten.mul.Tensor) and isinstance(user.args[1], Node):
        found.value = user.args[1] if user.args[0] is root else user.args[0]
    elif not inverse and is_call(user, aten.div.Tensor) and user.args[1] is root:
        found.value = user.args[0]
    else:
        return found
    found.normed = user
    return found


def is_sum_with_literal(node) -> bool:
    """a + literal, without a factor."""
    plain = is_call(node, aten.add.Tensor, aten.add.Scalar) and not node.kwargs and len(node.args) == 2
    return plain and isinstance(node.args[1], (int, float))


def mean_over_last(node) -> Node | None:
    """x of mean(x, -1, keepdim=True) in x's own dtype."""
    if not is_call(node, aten.mean.dim) or node.kwargs.get("dtype") is not None:
        return None
    x = node.args[0]
    keeps = len(node.args) > 2 and node.args[2]
    return x if keeps and list(node.args[1]) in ([-1], [val(x).dim() - 1]) else None


def squared_value(node) -> Node | None:
    """x of x ** 2, x * x or square(x)."""
    if (is_call(node, *_POWERS) and node.args[1] == 2) or is_call(node, aten.square.default):
        return node.args[0]
    return node.args[0] if is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1] else None


def weight_product(node: Node, width: int, target=aten.mul.Tensor) -> tuple[Node, Node] | None:
    """(product, weight) if the only user of `node` combines it with a parameter [width] of its own dtype."""
    users = list(node.users)
    if len(users) != 1 or not is_call(users[0], target) or users[0].kwargs:
        return None
    product = users[0]
    weight = product.args[1] if product.args[0] is node else product.args[0]
    fits = (
        isinstance(weight, Node)
        and skip_casts(weight).op == "get_attr"
        and list(val(weight).shape) == [width]
    )
    return (product, weight) if fits and val(weight).dtype is val(node).dtype else None
