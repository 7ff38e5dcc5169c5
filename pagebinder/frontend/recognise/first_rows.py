"""The first tokens as they are, and the others made with those before them, as own code smears or mixes neighbours.

Matches:
    cat([x[:, :n], f(y[:, n:], z[:, :-n])], 1)       f computes each row from the same row of its operands
Replaces with:
    where(positions >= n, f(y, shifted z), x)        shifted z: n rows of zeros, then z without its last n

A row of f's result is made for the first tokens, too, and dropped. The shift becomes a state (causal_conv.py).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pagebinder.frontend.recognise.token_stretches import CATS, num_tokens
from pagebinder.frontend.token_dims import token_dims
from pagebinder.graph_tools import (
    CASTS,
    IDENTITIES,
    arg,
    aten,
    calls,
    describe,
    finish,
    insert_call,
    is_call,
    val,
)
from pagebinder.report import Match, PassResult

PATTERN = "first_rows"
# Beside pointwise ops: one row of the result is made of one row.
_BY_ROW = (
    aten.linear.default,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.select.int,
    *CASTS,
    *IDENTITIES,
)


def recognise_first_rows(gm: GraphModule) -> PassResult:
    """Of a decoder's graph, whose inputs are input_ids [T] and positions [T]. Other sites are for others."""
    result = PassResult(name="recognise_first_rows")
    positions = next((n for n in gm.graph.find_nodes(op="placeholder") if n.target == "positions"), None)
    for node in calls(gm.graph, *CATS) if positions is not None else ():
        site = _site(node)
        if site is None:
            continue
        result.matches.append(Match(pattern=PATTERN, detail=f"{site.num_first} rows", **describe(node)))
        node.replace_all_uses_with(_with_all_rows(gm, node, site, positions))
        gm.graph.erase_node(node)
    result.changed = bool(result.matches)
    finish(gm)
    return result


class _Site:
    """`first`: the tensor whose first rows are kept. `later`, `earlier`: slices of whole tensors without their first
    or last rows. `between`: calls from them to the other part, in order."""

    def __init__(self, dim: int, num_first: int, first: Node, rest: Node) -> None:
        self.dim, self.num_first, self.first, self.rest = dim, num_first, first, rest
        self.later: list[Node] = []
        self.earlier: list[Node] = []
        self.between: list[Node] = []


def _site(node: Node) -> _Site | None:
    parts, dim = list(node.args[0]), arg(node, 1, "dim", 0)
    if len(parts) != 2 or not is_call(parts[0], aten.slice.Tensor):
        return None
    head, rest = parts
    dim %= val(node).dim()
    start, num_first = arg(head, 2, "start", 0) or 0, val(head).shape[dim]
    whole = head.args[0]
    is_head = arg(head, 1, "dim", 0) % val(node).dim() == dim and type(num_first) is int and start == 0
    if not is_head or num_first < 1 or not _has_all(whole, dim) or val(whole).dtype is not val(rest).dtype:
        return None
    site = _Site(dim, num_first, whole, rest)
    return site if _collect(site) and (site.later or site.earlier) else None


def _has_all(node: Node, dim: int) -> bool:
    size = val(node).shape[dim]
    return token_dims(node) == [dim] and size.node.expr == num_tokens(node.graph)


def _is_short(node: Node, num_first: int) -> list[int]:
    """The dimensions that have all rows but the first, or the last."""
    short = num_tokens(node.graph) - num_first
    sizes = val(node).shape if isinstance(node.meta.get("val"), torch.Tensor) else ()
    return [d for d, n in enumerate(sizes) if isinstance(n, torch.SymInt) and n.node.expr == short]


def _collect(site: _Site) -> bool:
    """Fills the site; False: a call between is not known to work row by row."""
    wanted = {site.rest}
    for node in reversed(list(site.rest.graph.nodes)):
        if node not in wanted:
            continue
        if (slices := _cut_of(site, node)) is not None:
            slices.append(node)
            continue
        if len(_is_short(node, site.num_first)) != 1 or not _is_by_row(site, node):
            return False
        site.between.insert(0, node)
        operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        short = [n for n in operands if _is_short(n, site.num_first)]
        if any(token_dims(n) for n in operands if n not in short):
            return False
        wanted.update(short)
    return True


def _cut_of(site: _Site, node: Node) -> list[Node] | None:
    """The list of the site that a slice of a whole tensor belongs to; None: it is no such slice."""
    if not is_call(node, aten.slice.Tensor) or _is_short(node, site.num_first) != [site.dim]:
        return None
    if not _has_all(node.args[0], site.dim) or arg(node, 4, "step", 1) != 1:
        return None
    start = arg(node, 2, "start", 0) or 0
    if start == site.num_first:
        return site.later
    return site.earlier if start == 0 else None


def _is_by_row(site: _Site, node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if is_call(node, aten.linear.default):
        return _is_short(node.args[0], site.num_first) != [val(node.args[0]).dim() - 1] and not any(
            _is_short(n, site.num_first) for n in node.args[1:] if isinstance(n, Node)
        )
    if is_call(node, aten.slice.Tensor, aten.select.int):
        dims = _is_short(node.args[0], site.num_first)
        return arg(node, 1, "dim", 0) % val(node.args[0]).dim() not in dims
    return node.target in _BY_ROW or torch.Tag.pointwise in node.target.tags


def _with_all_rows(gm: GraphModule, node: Node, site: _Site, positions: Node) -> Node:
    new = {cut: cut.args[0] for cut in site.later}
    for cut in site.earlier:
        behind = val(cut).dim() - 1 - site.dim
        pads = [*[0, 0] * behind, site.num_first, -site.num_first]
        new[cut] = insert_call(gm.graph, node, aten.pad.default, (cut.args[0], pads))
    for call in site.between:
        args, kwargs = map_arg((call.args, call.kwargs), lambda n: new.get(n, n))
        new[call] = insert_call(gm.graph, node, call.target, args, kwargs)
        new[call].meta.update({k: v for k, v in call.meta.items() if k != "val"})
    is_later = insert_call(gm.graph, node, aten.ge.Scalar, (positions, site.num_first))
    for place in range(val(node).dim() - 1):
        is_later = insert_call(
            gm.graph, node, aten.unsqueeze.default, (is_later, 0 if place < site.dim else -1)
        )
    return insert_call(gm.graph, node, aten.where.self, (is_later, new[site.rest], site.first))
