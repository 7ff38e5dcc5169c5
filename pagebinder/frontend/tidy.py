"""Nodes of a captured graph that mean nothing for its result, taken out before anybody reads it.

_assert_tensor_metadata, _assert_scalar   gone: users that break matching, or read values of the ids
cat([tensor([]), x]), cat([x])            x: what a cache that was empty makes of keys and values
cat([x, y]), y without channels           x: what is not turned, of heads that turn as a whole
type_as(x, y)                             to(x, y's dtype): y is no longer used by it
repeat_interleave(x, k, 0) of tokens      expand of x.unsqueeze(1), which says whose the k rows are
outer(x, y), ger(x, y)                    x.unsqueeze(1) * y, as most write angles of positions
narrow(x, d, 0, n)                        x[:n], along d
x[-T:] of T tokens                        x, and what is written there is all of x
x.new_full(size, y), x.new_zeros(size)    full(size, y), zeros(size) of x's dtype: x is no longer used by it
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from pagebinder.graph_tools import arg, aten, insert_call, is_call, size_text, val

ASSERTIONS = (aten._assert_tensor_metadata.default, aten._assert_scalar.default)


def tidy(gm: GraphModule) -> None:
    """In place; dead nodes are left for `finish`."""
    narrow_as_slice(gm.graph)
    for node in list(gm.graph.nodes):
        if is_call(node, *ASSERTIONS):
            gm.graph.erase_node(node)
        elif is_call(node, aten.cat.default):
            _without_empty_parts(gm, node)
        elif is_call(node, aten.type_as.default) and val(node.args[0]).device == val(node).device:
            cast = insert_call(gm.graph, node, aten.to.dtype, (node.args[0], val(node).dtype))
            _replace(gm, node, cast)
        elif is_call(node, aten.outer.default, aten.ger.default):
            column = insert_call(gm.graph, node, aten.unsqueeze.default, (node.args[0], 1))
            _replace(gm, node, insert_call(gm.graph, node, aten.mul.Tensor, (column, node.args[1])))
        elif is_call(node, aten.repeat_interleave.self_int):
            _with_rows_of_each(gm, node)
        elif is_call(node, *_NEW):
            facts = {"dtype": val(node).dtype, "device": val(node).device}
            _replace(gm, node, insert_call(gm.graph, node, _NEW[node.target], node.args[1:], facts))
        elif is_call(node, aten.slice.Tensor) and _has_all_tokens(node.args[0], node, arg(node, 1, "dim", 0)):
            _replace(gm, node, node.args[0])
        elif is_call(node, aten.slice_scatter.default):
            _written_whole(gm, node)


_NEW = {
    aten.new_full.default: aten.full.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
}


def narrow_as_slice(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.narrow.default):
        x, dim, start, length = node.args
        if type(start) is int and start == 0:
            node.replace_all_uses_with(insert_call(graph, node, aten.slice.Tensor, (x, dim, 0, length)))
            graph.erase_node(node)


def _without_empty_parts(gm: GraphModule, node: Node) -> None:
    dim = arg(node, 1, "dim", 0)
    parts = [n for n in node.args[0] if val(n).shape != (0,) and not _is_zero(val(n).shape[dim])]
    if len(parts) == 1 and val(parts[0]).dtype is val(node).dtype:
        _replace(gm, node, parts[0])


def _with_rows_of_each(gm: GraphModule, node: Node) -> None:
    x, times = node.args[:2]
    of_tokens = arg(node, 2, "dim") == 0 and isinstance(val(x).shape[0], torch.SymInt)
    if not of_tokens or not isinstance(times, int) or arg(node, 3, "output_size") is not None:
        return
    rest = list(val(x).shape[1:])
    if any(isinstance(size, torch.SymInt) for size in rest):
        return
    column = insert_call(gm.graph, node, aten.unsqueeze.default, (x, 1))
    several = insert_call(gm.graph, node, aten.expand.default, (column, [-1, times, *rest]))
    _replace(gm, node, insert_call(gm.graph, node, aten.reshape.default, (several, [-1, *rest])))


def _has_all_tokens(whole: Node, part: Node, dim: int) -> bool:
    size = val(whole).shape[dim]
    return isinstance(size, torch.SymInt) and size_text(size) == size_text(val(part).shape[dim])


def _written_whole(gm: GraphModule, node: Node) -> None:
    x, part = node.args[:2]
    sizes = [[size_text(size) for size in val(n).shape] for n in (x, part)]
    if sizes[0] == sizes[1] and _has_all_tokens(x, part, arg(node, 2, "dim", 0)):
        same = val(part).dtype is val(x).dtype
        _replace(gm, node, part if same else insert_call(gm.graph, node, aten.to.dtype, (part, val(x).dtype)))


def _is_zero(size) -> bool:
    return isinstance(size, int) and size == 0


def _replace(gm: GraphModule, node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    gm.graph.erase_node(node)
