"""Weights of which some heads are taken become weights of those heads.

Matches:
    softmax(scores [.., N, T, T]).view(.., H, 2, T, T)[.., i, :, :]       select; chunk, split or slices of heads, too
Replaces with:
    softmax(scores of these heads)          scores: q[these] @ k[these]^T, and what is done to them on the way

So each selection is recognised as an attention of its own (differential attention, whose pairs of heads lie side by
side); it is no step of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pagebinder.frontend.recognise.operands import SCALINGS, SOFTMAXES, is_of_pairs
from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, calls, finish, insert_call, is_call, val

HEADS = -3  # the dimension, of scores, of masks, and of the operands of their product
_SPLITS = (aten.view.default, aten.reshape.default, aten.unflatten.int)
_LISTS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
_BY_ENTRY = (
    *SCALINGS, aten.add.Tensor, aten.sub.Tensor, aten.tanh.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor,
    aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.nan_to_num.default, aten.dropout.default,
    *CASTS, *IDENTITIES,
)  # fmt: skip


class NotTaken(Exception):
    """The heads of something on the way cannot be taken by themselves."""


@dataclass(frozen=True)
class _Taking:
    """Of `count` heads those that `take` takes: (insert a call, a node, its number of dimensions) -> a node."""

    count: int
    take: Callable[[Callable, Node, int], Node]


def take_heads_first(gm: GraphModule) -> bool:
    """Rewrite each selection of heads of weights; was there one?"""
    found = False
    for softmax in list(calls(gm.graph, *SOFTMAXES)):
        if not is_of_pairs(softmax) or val(softmax).dim() < -HEADS:
            continue
        for taken, source, taking in list(_selections(softmax)):
            try:
                instead = _Rewriter(gm, taken, taking).of(source)
            except NotTaken:
                continue
            taken.replace_all_uses_with(instead)
            found = True
    if found:
        finish(gm)
    return found


def _selections(softmax: Node):
    """(selection, what it is taken of, how) of everything behind a softmax that takes some of its heads."""
    queue = [softmax]
    while queue:
        node = queue.pop()
        count = val(node).shape[HEADS]
        for user in node.users:
            if is_call(user, *CASTS, *IDENTITIES, aten.dropout.default):
                queue.append(user)
            elif is_call(user, aten.slice.Tensor) and _is_dim(arg(user, 1, "dim", 0), node, HEADS):
                yield user, node, _Taking(count, _slice(*user.args[2:]))
            elif is_call(user, *_LISTS) and _is_dim(arg(user, 2, "dim", 0), node, HEADS):
                for part in user.users:
                    yield part, node, _Taking(count, _slice(*_bounds(user, part.args[1])))
            elif is_call(user, *_SPLITS) and _splits_heads(node, user):
                yield from _of_split(node, user)


def _of_split(weights: Node, split: Node):
    """The same behind [.., a, b, T, T]: one of a or of b, by select or unbind."""
    count, (*_, a, b, _rows, _columns) = val(weights).shape[HEADS], val(split).shape
    for part in split.users:
        if not is_call(part, aten.select.int, aten.unbind.int):
            continue
        dim = arg(part, 1, "dim", 0)
        dim -= val(split).dim() * (dim >= 0)
        if dim not in (HEADS - 1, HEADS):
            continue
        if is_call(part, aten.select.int):
            yield part, weights, _Taking(count, _select([a, b], dim - HEADS, part.args[2]))
        else:
            for one in part.users:
                yield one, weights, _Taking(count, _select([a, b], dim - HEADS, one.args[1]))


def _is_dim(dim: int, node: Node, expected: int) -> bool:
    return dim in (expected, expected + val(node).dim())


def _splits_heads(before: Node, view: Node) -> bool:
    """[.., N, T, T] -> [.., a, b, T, T]."""
    old, new = list(val(before).shape), list(val(view).shape)
    if len(new) != len(old) + 1 or [str(s) for s in new[-2:]] != [str(s) for s in old[-2:]]:
        return False
    outer = [str(s) for s in new[: HEADS - 1]] == [str(s) for s in old[:HEADS]]
    return outer and all(isinstance(s, int) for s in new[HEADS - 1 : HEADS + 1])


def _bounds(parts: Node, index: int) -> tuple[int, int]:
    sizes = [part.shape[HEADS] for part in parts.meta["val"]]
    return sum(sizes[:index]), sum(sizes[: index + 1])


def _slice(*bounds) -> Callable:
    return lambda insert, x, rank: insert(aten.slice.Tensor, (x, rank + HEADS, *bounds))


def _select(sizes: list[int], which: int, index: int) -> Callable:
    """Heads are [a, b] = `sizes`; `which` is -1 where `index` is of a, 0 where it is of b."""

    def take(insert, x, rank):
        split = insert(aten.unflatten.int, (x, rank + HEADS, sizes))
        return insert(aten.select.int, (split, rank + HEADS + 1 + which, index))

    return take


class _Rewriter:
    """Inserts, before `where`, what makes the weights of some heads."""

    def __init__(self, gm: GraphModule, where: Node, taking: _Taking) -> None:
        self.gm, self.where, self.taking = gm, where, taking
        self._made: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        """These heads of weights, of scores or of anything that these are made of."""
        if node not in self._made:
            self._made[node] = self._remade(node)
        return self._made[node]

    def _remade(self, node: Node) -> Node:
        if is_call(node, *SOFTMAXES, *_BY_ENTRY) and is_of_pairs(node):
            args = map_arg(node.args, self._entry)
            return self._insert(node.target, args, dict(node.kwargs))
        if is_call(node, aten.matmul.default):
            return self._insert(node.target, tuple(self._heads_of(x) for x in node.args))
        raise NotTaken(node.target)

    def _entry(self, node: Node) -> Node:
        """An operand of what works entry by entry: scores, or what is broadcast to them."""
        if _has_heads(node, self.taking.count) and _has_product(node):
            return self.of(node)
        return self._heads_of(node)

    def _heads_of(self, x: Node) -> Node:
        value = x.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() < -HEADS or value.shape[HEADS] == 1:
            return x  # broadcast to all heads
        if value.shape[HEADS] != self.taking.count:
            raise NotTaken(f"{x} has other heads")
        return self.taking.take(self._insert, x, value.dim())

    def _insert(self, target, args: tuple, kwargs: dict | None = None) -> Node:
        return insert_call(self.gm.graph, self.where, target, args, kwargs)


def _has_heads(node: Node, count: int) -> bool:
    """[.., count, T, T], several heads."""
    return is_of_pairs(node) and val(node).dim() >= -HEADS and val(node).shape[HEADS] == count > 1


def _has_product(node: Node) -> bool:
    """Is it scores, or weights?"""
    if is_call(node, aten.matmul.default):
        return True
    return is_call(node, *SOFTMAXES, *_BY_ENTRY) and any(
        is_of_pairs(n) and _has_product(n) for n in node.all_input_nodes
    )
