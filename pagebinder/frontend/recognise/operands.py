"""Products of two values with their dimensions named, and attention operands brought to [T, heads, width].

matmul, bmm, baddbmm and einsum say in different ways which dimensions go together. Here each dimension of an operand
gets a label, as einsum has them, so that the rest of raw attention's recogniser need not know how it was written.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, einsum_labels, insert_call, is_call, val

SOFTMAXES = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default)
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default,
             aten.squeeze.dim, aten.squeeze.default, aten.flatten.using_ints)  # fmt: skip
SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)

# A model is traced in evaluation mode, whatever its own is.
DROPS = (
    "attention with dropout in evaluation mode, too: F.dropout without training=self.training, or a dropout_p that "
    "is not 0 there"
)


class NotAttention(Exception):
    """Why the walk from a softmax stopped."""


@dataclass
class Operand:
    """A value whose dimension i is called labels[i]; `factor` was divided out of it on the way to this node."""

    node: Node
    labels: list[str]
    factor: Fraction = Fraction(1)

    def size(self, label: str):
        """The size of a dimension; one that the operand lacks is broadcast."""
        return val(self.node).shape[self.labels.index(label)] if label in self.labels else 1


@dataclass
class Product:
    """out[labels] = factor * sum over what is missing in labels of a * b, plus bias_factor * bias."""

    a: Operand
    b: Operand
    labels: list[str]
    factor: Fraction = Fraction(1)
    bias: Node | None = None
    bias_factor: Fraction = field(default_factory=lambda: Fraction(1))


def product_of(node: Node) -> Product:
    """The operands of a product with their labels."""
    if is_call(node, aten.einsum.default):
        return _einsum(node)
    first = 1 if node.target is aten.baddbmm.default else 0
    a, b = node.args[first : first + 2]
    ranks = val(a).dim(), val(b).dim()
    if min(ranks) < 2:
        raise NotAttention("a product with a vector")
    leading = [f"lead{i}" for i in range(max(ranks) - 2)]
    product = Product(
        Operand(a, [*leading[len(leading) - (ranks[0] - 2) :], "row", "inner"]),
        Operand(b, [*leading[len(leading) - (ranks[1] - 2) :], "inner", "column"]),
        [*leading, "row", "column"],
    )
    if first:
        alpha, beta = arg(node, 4, "alpha", 1), arg(node, 3, "beta", 1)
        if isinstance(alpha, Node) or isinstance(beta, Node):
            raise NotAttention("the product is scaled by what depends on the number of tokens")
        product.factor = Fraction(alpha)
        product.bias, product.bias_factor = node.args[0], Fraction(beta)
    return product


def _einsum(node: Node) -> Product:
    equation, operands = node.args[0].replace(" ", ""), node.args[1]
    labels = einsum_labels(node)
    if "." in equation or labels is None or len(operands) != 2:
        raise NotAttention(
            f"the einsum {equation!r} is no product of two tensors with every letter written out"
        )
    (a, b), out = labels
    if any(len(set(labels)) != len(labels) for labels in (a, b)):
        raise NotAttention(f"the einsum {equation!r} takes a diagonal")
    return Product(Operand(operands[0], a), Operand(operands[1], b), out)


class ProductWithValues:
    """out = weights @ v with v's labels renamed: the keys' dimension, its width, and the leading dimensions."""

    def __init__(self, product: Product, weights: Operand, values: Operand):
        *self.weight_leading, row, inner = weights.labels
        out = product.labels
        widths = [label for label in values.labels if label not in weights.labels]
        if (
            row not in out
            or inner in out
            or inner not in values.labels
            or row in values.labels
            or len(widths) != 1
        ):
            raise NotAttention("the weights are not multiplied with the values over the keys")
        if not set(self.weight_leading) <= set(out) or len(out) != len(self.weight_leading) + 2:
            raise NotAttention("the product with the values sums over heads, or adds dimensions")
        self.values, self.inner, self.width = values, inner, widths[0]
        names = {row: "tokens", self.width: "width"}
        self.out_labels = [names.get(label, label) for label in out]


def product_with_values(node: Node, weights: Node) -> ProductWithValues:
    """The product that `weights` [.., T, T] enters. Raises NotAttention: it is not over the keys."""
    product = product_of(node)
    if product.bias is not None or product.a.node is product.b.node:
        raise NotAttention("something is added to the product with the values")
    first = product.a.node is weights
    return ProductWithValues(product, *((product.a, product.b) if first else (product.b, product.a)))


def stripped(operand: Operand, *, fold_factors: bool) -> Operand:
    """The same operand at an earlier node: transposes, copies, widening casts and scalings undone."""
    node, labels, factor = operand.node, list(operand.labels), operand.factor
    while isinstance(node, Node) and node.op == "call_function" and node.args:
        x = node.args[0]
        if is_call(node, aten.transpose.int, aten.mT.default):
            i, j = (
                d % len(labels) for d in (node.args[1:3] if node.target is aten.transpose.int else (-2, -1))
            )
            labels[i], labels[j] = labels[j], labels[i]
        elif is_call(node, aten.permute.default):
            order = [d % len(labels) for d in node.args[1]]
            labels = [labels[order.index(d)] for d in range(len(order))]
        elif is_call(node, *CASTS):
            if val(node).dtype is not val(x).dtype and not _widens(val(x).dtype, val(node).dtype):
                break
        elif is_call(node, *SCALINGS) and fold_factors and (step := _exact_factor(node)) is not None:
            factor *= step
        elif is_call(node, *_RESHAPES) and (relabelled := _without_ones(node, labels)) is not None:
            labels = relabelled
        elif not is_call(node, *IDENTITIES):
            break
        node = x
    return Operand(node, labels, factor)


def _widens(before: torch.dtype, after: torch.dtype) -> bool:
    """bfloat16 or float16 to float32: the attention op computes in float32 by itself."""
    return before in (torch.bfloat16, torch.float16) and after is torch.float32


def _exact_factor(node: Node) -> Fraction | None:
    """The factor of x * c or x / c, where taking it out changes no rounding to a narrow type."""
    factor = scaling(node)
    if factor is None or not factor:
        return None
    power_of_two = abs(factor.numerator) == 1 or factor.denominator == 1
    power_of_two = power_of_two and math.frexp(float(factor))[0] in (0.5, -0.5)
    return factor if power_of_two or val(node).dtype is torch.float32 else None


def is_of_pairs(value) -> bool:
    """[.., T, T]: a row and a column for each token."""
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        return False
    return all(isinstance(size, torch.SymInt) for size in tensor.shape[-2:])


def reduces_columns(node: Node) -> bool:
    """Is a reduction (sum, amax, logsumexp, max) over the last dimension alone, which it keeps?"""
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    last = val(node.args[0]).dim() - 1
    return list(dims) in ([-1], [last]) and bool(arg(node, 2, "keepdim", False))


def scaling(node: Node) -> Fraction | None:
    """c of x * c, 1 / c of x / c, for a literal c."""
    c = node.args[1]
    if not isinstance(c, (int, float)) or isinstance(c, bool) or not math.isfinite(c) or c == 0:
        return None
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    return 1 / Fraction(c) if divides else Fraction(c)


def _without_ones(reshape: Node, labels: list[str]) -> list[str] | None:
    """Labels of a reshape's input, if it only adds or drops dimensions of size one."""
    before, after = val(reshape.args[0]).shape, val(reshape).shape
    kept = [(label, size) for label, size in zip(labels, after) if not _is_one(size)]
    sizes = [size for size in before if not _is_one(size)]
    if [_key(s) for _, s in kept] != [_key(s) for s in sizes]:
        return None
    remaining = iter(kept)
    return [f"one{i}_{reshape.name}" if _is_one(s) else next(remaining)[0] for i, s in enumerate(before)]


def unrepeated(operand: Operand, head: str, *, fold_factors: bool) -> Operand:
    """The operand before every KV head was repeated for its group of query heads; itself if it was not.

    `fold_factors`: as in `stripped`; only for a caller that uses the operand's factor.
    """
    x = operand.node
    if head not in operand.labels:
        return operand
    dim = operand.labels.index(head)
    if is_call(x, aten.repeat_interleave.self_int):
        same = isinstance(x.args[1], int) and arg(x, 2, "dim") in (dim, dim - val(x).dim())
        before = Operand(x.args[0], operand.labels, operand.factor)
        return stripped(before, fold_factors=fold_factors) if same else operand
    if not is_call(
        x, aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints
    ):
        return operand
    expanded = x.args[0]
    if is_call(expanded, aten.clone.default, aten.contiguous.default):
        expanded = expanded.args[0]
    inner = expanded.args[0] if is_call(expanded, aten.expand.default) else None
    if not is_call(inner, aten.unsqueeze.default) or inner.args[1] not in (
        dim + 1,
        dim + 1 - val(inner).dim(),
    ):
        return operand
    source = inner.args[0]
    shape, repeated = [_key(s) for s in val(source).shape], [_key(s) for s in val(x).shape]
    same = shape[:dim] + shape[dim + 1 :] == repeated[:dim] + repeated[dim + 1 :]
    wide = [_key(s) for s in val(expanded).shape]
    same = same and wide[: dim + 1] + wide[dim + 2 :] == shape and isinstance(shape[dim], int)
    before = Operand(source, operand.labels, operand.factor)
    return stripped(before, fold_factors=fold_factors) if same else operand


def num_heads(operand: Operand, leading: list[str], sizes: list[int]) -> int | None:
    """How many heads an operand has of the scores' prod(sizes); None: they are repeated in another order.

    Query head h uses KV head h // group: dimensions are whole up to one that is divided, and absent after it.
    """
    total, divided = 1, False
    for label, full in zip(leading, sizes):
        size = operand.size(label)
        if (divided and size != 1) or not isinstance(size, int) or full % size:
            return None
        divided = divided or size != full
        total *= size
    return total


def in_one_dtype(gm: GraphModule, before: Node, values: list[Node]) -> list[Node]:
    """As an attention op takes them. `stripped` may have found one before it was rounded, and another behind."""
    dtype = functools.reduce(torch.promote_types, (val(x).dtype for x in values))
    return [
        x if val(x).dtype is dtype else insert_call(gm.graph, before, aten.to.dtype, (x, dtype))
        for x in values
    ]


def flat_heads(
    gm: GraphModule, where: Node, operand: Operand, tokens: str, leading: list[str], width: str
) -> Node:
    """[T, heads, width] of an operand, as views where possible; inserted before `where`."""
    node, labels = operand.node, list(operand.labels)
    for dim in reversed(range(len(labels))):
        if labels[dim] not in (tokens, width) and _is_one(val(node).shape[dim]):
            node = insert_call(gm.graph, where, aten.select.int, (node, dim, 0))
            del labels[dim]
    heads = [label for label in leading if label in labels]
    if set(labels) != {tokens, width, *heads}:
        raise NotAttention("an operand has dimensions that the scores lack")
    order = [labels.index(label) for label in (tokens, *heads, width)]
    node = _permuted(gm, where, node, order)
    if len(heads) != 1:
        count = math.prod(val(node).shape[1:-1])
        node = insert_call(gm.graph, where, aten.reshape.default, (node, [-1, count, val(node).shape[-1]]))
    if val(node).stride(-1) != 1:  # channels before tokens, as convolutions have them
        node = insert_call(gm.graph, where, aten.contiguous.default, (node,))
    return node


def in_order(gm: GraphModule, where: Node, x: Node, labels: list[str], order: list[str]) -> Node:
    """x, its dimensions the last of `labels`, with one for each label of `order`, of size 1 where it had none."""
    own = labels[len(labels) - val(x).dim() :]
    for dim in reversed(range(len(own))):
        if own[dim] not in order:
            if not _is_one(val(x).shape[dim]):
                raise NotAttention("a factor differs along a dimension that what it multiplies lacks")
            x = insert_call(gm.graph, where, aten.select.int, (x, dim, 0))
            del own[dim]
    for label in (label for label in order if label not in own):
        x = insert_call(gm.graph, where, aten.unsqueeze.default, (x, 0))
        own.insert(0, label)
    return _permuted(gm, where, x, [own.index(label) for label in order])


def from_flat_heads(
    gm: GraphModule, where: Node, out: Node, sizes: dict[str, int], labels: list[str]
) -> Node:
    """[T, H, Dv] -> the layout of `labels`: "tokens", "width" and the leading dimensions, in any order."""
    ones = [label for label, size in sizes.items() if size == 1]
    heads = [label for label in sizes if label not in ones]
    if len(heads) != 1:
        shape = [-1, *(sizes[label] for label in heads), val(out).shape[-1]]
        out = insert_call(gm.graph, where, aten.reshape.default, (out, shape))
    for _ in ones:  # one head alone is a leading dimension of size one, too
        out = insert_call(gm.graph, where, aten.unsqueeze.default, (out, 0))
    present = [*ones, "tokens", *heads, "width"]
    return _permuted(gm, where, out, [present.index(label) for label in labels])


def _permuted(gm: GraphModule, where: Node, node: Node, order: list[int]) -> Node:
    moved = [d for d, o in enumerate(order) if d != o]
    if not moved:
        return node
    if len(moved) == 2:
        return insert_call(gm.graph, where, aten.transpose.int, (node, *moved))
    return insert_call(gm.graph, where, aten.permute.default, (node, order))


def _is_one(size) -> bool:
    return isinstance(size, int) and size == 1


def _key(size):
    return size.node.expr if isinstance(size, torch.SymInt) else size
