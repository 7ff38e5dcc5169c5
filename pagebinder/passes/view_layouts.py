"""How a view lies in the memory of the tensor that it is a view of, as formulas of the graph's sizes.

    base   [1, T, 2048]     strides [2048 T, 2048, 1]     offset 0
    view   [T, 16, 128]     strides [2048, 128, 1]        offset 0         of view(1, T, 16, 128), select(0, 0)

Two views of one base with equal layouts are the same tensor, whatever led to them. Nothing here runs an op on a fake
tensor, so nothing is guessed from the sizes that a model was traced with and no guard is added: what does not follow
for every size is unknown. Only strides of dimensions with one entry are left open, as no address depends on them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from pagebinder.custom_ops.library import NAMESPACE as OURS
from pagebinder.graph_tools import arg, aten, val

ZERO, ONE = sympy.Integer(0), sympy.Integer(1)
Sizes = tuple[sympy.Expr, ...]


@dataclass(frozen=True)
class Layout:
    """Sizes and strides of the dimensions, and the first entry's offset from the base's first entry, all in entries.

    Equal layouts compare equal: formulas are expanded, and a dimension of size 1 has stride 0 here.
    """

    sizes: Sizes
    strides: Sizes
    offset: sympy.Expr

    @classmethod
    def of(cls, sizes: Iterable[sympy.Expr], strides: Iterable[sympy.Expr], offset=ZERO) -> Layout:
        sizes = tuple(sizes)
        strides = (ZERO if n == 1 else _expand(s) for n, s in zip(sizes, strides, strict=True))
        return cls(sizes, tuple(strides), _expand(offset))

    @property
    def dims(self) -> list[tuple[sympy.Expr, sympy.Expr]]:
        return list(zip(self.sizes, self.strides, strict=True))

    def replaced(self, dims: Iterable[tuple[sympy.Expr, sympy.Expr]], offset: sympy.Expr = ZERO) -> Layout:
        """With other dimensions, `offset` entries further on."""
        dims = list(dims)
        return Layout.of((n for n, _ in dims), (s for _, s in dims), self.offset + offset)


def sizes_of(tensor: torch.Tensor) -> Sizes:
    return tuple(map(expression, tensor.shape))


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """A size as a formula; equal formulas of products and sums are written alike."""
    return _expand(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)


@functools.lru_cache(10_000)
def _expand(formula: sympy.Expr) -> sympy.Expr:
    return sympy.expand(formula)


def base_layout(node: Node, given: Container[Node] = ()) -> Layout:
    """The layout of a tensor that is no view, or not for certain.

    Strides are unknowns where a step may have others than the traced ones: of what is `given` (see `is_given`), and
    of what only some sizes make a copy. A vector that is given has a stride of one.
    """
    sizes, strides = sizes_of(val(node)), map(expression, val(node).stride())
    may_be_view = node.target in RULES and node.target is not aten.contiguous.default
    if may_be_view or (len(sizes) > 1 and node in given):
        strides = (sympy.Symbol(f"stride_{dim}", integer=True) for dim in range(len(sizes)))
    return Layout.of(sizes, strides)


def is_given(node: Node, given: Container[Node]) -> bool:
    """Is a tensor an input or a weight, or made of such alone by torch's ops, which may keep their strides?

    They may lie otherwise than those that were traced: caches are parts of larger ones, weights are packed.
    """
    if node.op != "call_function":
        return not (isinstance(node.meta.get("val"), torch.Tensor) and val(node).dim() < 2)
    inputs = node.all_input_nodes
    is_ours = str(getattr(node.target, "namespace", "")).startswith(OURS)
    return not is_ours and bool(inputs) and all(n in given for n in inputs)


def view_layout(node: Node, x: Layout) -> Layout | None:
    """The layout of what a call makes of a tensor with layout `x`; None if it is no view, or not for certain."""
    rule = RULES.get(node.target)
    found = None if rule is None else rule(node, x)
    return found if found is not None and found.sizes == sizes_of(val(node)) else None


def reshaped(x: Layout, sizes: Sizes) -> Layout | None:
    """What x.view(sizes) is, or None where `x` is not known to have such a view.

    Dimensions of `x` that lie behind each other without a gap are one run; new sizes must fill up one run after the
    other, from the last one on.
    """
    if not x.sizes:
        return Layout.of(sizes, sizes, x.offset) if set(sizes) <= {ONE} else None
    if ZERO in sizes or ZERO in x.sizes:
        return None
    strides: list[sympy.Expr] = []
    remaining, run, stride = list(sizes), ONE, x.strides[-1]
    for dim in reversed(range(len(x.sizes))):
        run = _expand(run * x.sizes[dim])
        if dim > 0 and (x.sizes[dim - 1] == 1 or x.strides[dim - 1] == _expand(run * stride)):
            continue
        filled = ONE
        while remaining and (filled != run or remaining[-1] == 1):
            strides.append(filled * stride)
            filled = _expand(filled * remaining.pop())
        if filled != run:
            return None
        if dim > 0:
            run, stride = ONE, x.strides[dim - 1]
    return None if remaining else Layout.of(sizes, reversed(strides), x.offset)


def _same(node: Node, x: Layout) -> Layout:
    return x


def _contiguous(node: Node, x: Layout) -> Layout | None:
    """No copy is made of what is contiguous."""
    if arg(node, 1, "memory_format", torch.contiguous_format) is not torch.contiguous_format:
        return None
    dense = (math.prod(x.sizes[dim + 1 :], start=ONE) for dim in range(len(x.sizes)))
    return x if Layout.of(x.sizes, dense, x.offset) == x else None


def _reshape(node: Node, x: Layout) -> Layout | None:
    return reshaped(x, sizes_of(val(node)))


def _permute(node: Node, x: Layout) -> Layout:
    return _permuted(x, [dim % len(x.sizes) for dim in node.args[1]])


def _transpose(node: Node, x: Layout) -> Layout:
    """Of two dimensions that are given, or of the last two."""
    order = list(range(len(x.sizes)))
    if len(order) > 1:
        a, b = node.args[1:3] if len(node.args) > 2 else (-2, -1)
        order[a], order[b] = order[b], order[a]
    return _permuted(x, order)


def _permuted(x: Layout, order: Sequence[int]) -> Layout:
    return x.replaced(x.dims[dim] for dim in order)


def _unsqueeze(node: Node, x: Layout) -> Layout:
    dim = node.args[1] % (len(x.sizes) + 1)
    return x.replaced([*x.dims[:dim], (ONE, ZERO), *x.dims[dim:]])


def _squeeze(node: Node, x: Layout) -> Layout | None:
    """A dimension that may have one entry in some step, and more in others, is not known to go or to stay."""
    given = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    dims = {dim % len(x.sizes) for dim in given} if x.sizes else set()
    if not all(x.sizes[dim].is_Integer for dim in dims):
        return None
    return _permuted(x, [dim for dim in range(len(x.sizes)) if dim not in dims or x.sizes[dim] != 1])


def _select(node: Node, x: Layout) -> Layout | None:
    dim, index = node.args[1] % len(x.sizes), node.args[2]
    size, stride = x.dims[dim]
    if not isinstance(index, int) or (index < 0 and not size.is_Integer):
        return None
    return x.replaced([*x.dims[:dim], *x.dims[dim + 1 :]], (index + size if index < 0 else index) * stride)


def _slice(node: Node, x: Layout) -> Layout | None:
    start, step = arg(node, 2, "start") or 0, arg(node, 4, "step", 1)
    dim = arg(node, 1, "dim", 0) % len(x.sizes)
    size, stride = x.dims[dim]
    if not isinstance(start, int) or not isinstance(step, int) or (start and not size.is_Integer):
        return None
    start = min(max(start + size if start < 0 else start, 0), size) if start else 0
    kept = sizes_of(val(node))[dim]
    return x.replaced([*x.dims[:dim], (kept, stride * step), *x.dims[dim + 1 :]], start * stride)


def _expanded(node: Node, x: Layout) -> Layout | None:
    """One entry becomes many at the same place; new dimensions come first."""
    sizes = sizes_of(val(node))
    before = [(ONE, ZERO)] * (len(sizes) - len(x.sizes)) + x.dims
    if any(n not in (ONE, size) for (n, _), size in zip(before, sizes, strict=True)):
        return None
    return x.replaced((size, stride if n == size else ZERO) for (n, stride), size in zip(before, sizes))


RULES: dict[object, Callable[[Node, Layout], Layout | None]] = {
    aten.alias.default: _same, aten.detach.default: _same, aten.contiguous.default: _contiguous,
    aten.view.default: _reshape, aten.reshape.default: _reshape, aten._unsafe_view.default: _reshape,
    aten.flatten.using_ints: _reshape, aten.unflatten.int: _reshape, aten.permute.default: _permute,
    aten.transpose.int: _transpose, aten.t.default: _transpose, aten.mT.default: _transpose,
    aten.unsqueeze.default: _unsqueeze, aten.squeeze.dim: _squeeze, aten.squeeze.dims: _squeeze,
    aten.select.int: _select, aten.slice.Tensor: _slice, aten.expand.default: _expanded,
}  # fmt: skip
