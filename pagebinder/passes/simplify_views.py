"""Chains of views become the shortest chain that gives the same tensor.

Matches:
    view_n(... view_1(base))        view, reshape of what need not be copied, select, unsqueeze, transpose, slice, ...
Replaces with:
    base | an equal view that is there already | view(base, sizes) | transpose, permute or select of an earlier view

"The same" is memory, sizes, strides and offset, for all sizes that a step may have (see view_layouts.py). So it holds
too where an op writes to the base in between: either way the caller sees the memory itself. A reshape that may copy
ends a chain. Sizes that are read twice are read once. A chain that cannot be shortened stays, in silence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import aten, describe, finish, insert_call, is_call
from pagebinder.passes.view_layouts import Layout, base_layout, expression, is_given, reshaped, view_layout
from pagebinder.report import Match, PassResult

PATTERN, SIZE_PATTERN = "views", "size"
# They find out in every step whether to copy; a view does not.
MAY_COPY = (aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int)


@dataclass
class _Views:
    """What is known about the tensors of a graph.

    given: see `is_given`. chains: view -> base, views between, itself. first: (base, layout) -> first such tensor.
    order: places in the graph. sizes: size -> the first node that computes it.
    """

    layouts: dict[Node, Layout] = field(default_factory=dict)
    given: set[Node] = field(default_factory=set)
    chains: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    first: dict[tuple[Node, Layout], Node] = field(default_factory=dict)
    order: dict[Node, int] = field(default_factory=dict)
    sizes: dict[sympy.Expr, Node] = field(default_factory=dict)


def simplify_views(gm: GraphModule) -> PassResult:
    """Shorten every chain, last views first: what only led to them is gone when its turn comes."""
    result = PassResult(name="simplify_views")
    views = _views(gm, result)
    for node in reversed(views.chains):
        if not node.users:
            gm.graph.erase_node(node)
            continue
        found = _shorter(gm, node, views)
        if found is not None:
            detail = f"{', '.join(n.target._opname for n in views.chains[node][1:])} -> {_name(found, views)}"
            result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(node)))
            node.replace_all_uses_with(found)
            gm.graph.erase_node(node)
    result.matches.reverse()
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _views(gm: GraphModule, result: PassResult) -> _Views:
    """Layouts of all tensors. Sizes that are there already are replaced on the way."""
    views = _Views()
    for position, node in enumerate(list(gm.graph.nodes)):
        views.order[node], value = position, node.meta.get("val")
        if is_given(node, views.given):
            views.given.add(node)
        if isinstance(value, torch.SymInt):
            same = views.sizes.setdefault(expression(value), node)
            if same is not node and is_call(node, aten.sym_size.int):
                result.matches.append(Match(pattern=SIZE_PATTERN, detail=same.name, **describe(node)))
                node.replace_all_uses_with(same)
                gm.graph.erase_node(node)
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            _add(node, views)
    return views


def _add(node: Node, views: _Views) -> None:
    x = node.args[0] if node.op == "call_function" and node.args else None
    is_tensor = isinstance(x, Node) and x in views.layouts
    layout = view_layout(node, views.layouts[x]) if is_tensor else None
    if layout is None:
        views.layouts[node], chain = base_layout(node, views.given), (node,)
    else:
        views.layouts[node], chain = layout, (*views.chains.get(x, (x,)), node)
        views.chains[node] = chain
    views.first.setdefault((chain[0], views.layouts[node]), node)


def _shorter(gm: GraphModule, node: Node, views: _Views) -> Node | None:
    """What can take the place of a view: an equal tensor, or one op on the earliest possible view of its chain."""
    chain, layout = views.chains[node], views.layouts[node]
    same = views.first[chain[0], layout]
    if same is not node:
        return same
    known = {size: n for size, n in views.sizes.items() if views.order[n] < views.order[node]}
    for x in chain[:-2]:
        call = _one_op(views.layouts[x], layout, known)
        if call is not None:
            return insert_call(gm.graph, node, call[0], (x, *call[1]), value=node.meta["val"])
    if node.target not in MAY_COPY or (sizes := _view(views.layouts[chain[-2]], layout, known)) is None:
        return None
    return insert_call(gm.graph, node, aten.view.default, (chain[-2], sizes), value=node.meta["val"])


def _name(found: Node, views: _Views) -> str:
    if found in views.chains:
        return "an equal view"
    return "nothing" if found in views.layouts else found.target._opname


def _view(x: Layout, wanted: Layout, known: dict[sympy.Expr, Node]) -> list[int | Node] | None:
    """The sizes with which x.view(sizes) has the wanted layout."""
    return _arguments(wanted.sizes, known) if reshaped(x, wanted.sizes) == wanted else None


def _one_op(x: Layout, wanted: Layout, known: dict[sympy.Expr, Node]) -> tuple[object, tuple] | None:
    """An op, and its arguments behind `x`, that makes the wanted layout of layout `x`."""
    sizes = _view(x, wanted, known)
    if sizes is not None:
        return aten.view.default, (sizes,)
    order = _order(x, wanted)
    if order is not None:
        moved = [dim for dim, source in enumerate(order) if dim != source]
        return (aten.transpose.int, tuple(moved)) if len(moved) == 2 else (aten.permute.default, (order,))
    for dim in range(len(x.sizes)):
        if [*x.dims[:dim], *x.dims[dim + 1 :]] == wanted.dims:
            size, stride = x.dims[dim]
            index = sympy.cancel((wanted.offset - x.offset) / stride) if stride != 0 else sympy.nan
            if index == 0 or (index.is_Integer and size.is_Integer and 0 < index < size):
                return aten.select.int, (dim, int(index))
    return None


def _order(x: Layout, wanted: Layout) -> list[int] | None:
    """The dimensions of `x` in the order in which `wanted` has them."""
    if x.offset != wanted.offset or len(x.sizes) != len(wanted.sizes):
        return None
    left, order = dict(enumerate(x.dims)), []
    for entry in wanted.dims:
        dim = next((d for d, other in left.items() if other == entry), None)
        if dim is None:
            return None
        order.append(dim)
        del left[dim]
    return order


def _arguments(sizes: tuple[sympy.Expr, ...], known: dict[sympy.Expr, Node]) -> list[int | Node] | None:
    """Sizes as arguments of a view: -1 for a single one that steps differ in, else those that the graph has.

    A -1 beside a size that may be zero could not be told from the others.
    """
    symbolic = [size for size in sizes if not size.is_Integer]
    if len(symbolic) == 1:
        return [int(size) if size.is_Integer else -1 for size in sizes]
    if any(size not in known for size in symbolic):
        return None
    return [int(size) if size.is_Integer else known[size] for size in sizes]
