"""Pieces of a rotary embedding: halves and pairs of channels, and tables of cosines and sines."""

from __future__ import annotations

import operator

from torch.fx import Node

from pagebinder.graph_tools import CASTS, IDENTITIES, arg, aten, is_call, val

_STEPS = (
    *CASTS, *IDENTITIES, aten.unsqueeze.default, aten.mul.Scalar, aten.slice.Tensor, aten.repeat_interleave.self_int,
    aten.expand.default, aten.select.int, aten.transpose.int, aten.permute.default, aten.squeeze.dim,
    aten.reshape.default, aten.view.default,
)  # fmt: skip
_LOOKUPS = (aten.index.Tensor, aten.embedding.default, aten.index_select.default, aten.gather.default)
_SPLITS = (aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default)


def part_of(part) -> tuple[Node, str] | None:
    """(x, "low" | "high"): halves of x; (x, "even" | "odd"): every other channel. By slice, chunk or split."""
    if is_call(part, aten.slice.Tensor):
        return _slice_of(part)
    if is_call(part, operator.getitem) and is_call(part.args[0], aten.chunk.default, aten.split.Tensor):
        pieces = part.args[0]
        x, width = pieces.args[0], val(pieces.args[0]).shape[-1]
        size = pieces.args[1] if pieces.target is aten.split.Tensor else -(-width // pieces.args[1])
        last = arg(pieces, 2, "dim", 0) in (-1, val(x).dim() - 1)
        if not isinstance(width, int) or not last or 2 * size != width:
            return None
        return x, ("low", "high")[part.args[1]]
    if is_call(part, aten.select.int, operator.getitem):
        return _selected(part)
    return None


def _slice_of(part: Node) -> tuple[Node, str] | None:
    x, dim, start, end = part.args[0], part.args[1], arg(part, 2, "start") or 0, arg(part, 3, "end")
    end = (1 << 62) if end is None else end
    width, last, step = val(x).shape[-1], val(x).dim() - 1, arg(part, 4, "step", 1)
    if dim not in (-1, last) or not isinstance(width, int) or width % 2:
        return None
    if step == 2 and start in (0, 1) and end >= width:
        return x, ("even", "odd")[start]
    if step == 1 and (start, end) == (0, width // 2):
        return x, "low"
    return (x, "high") if step == 1 and start == width // 2 and end >= width else None


def _selected(part: Node) -> tuple[Node, str] | None:
    """x.unflatten(-1, (-1, 2))[..., i], by select or by unbind."""
    if is_call(part, aten.select.int):
        pairs, dim, index = part.args
    elif is_call(part.args[0], aten.unbind.int):
        pairs, dim, index = part.args[0].args[0], arg(part.args[0], 1, "dim", 0), part.args[1]
    else:
        return None
    if not is_call(pairs, aten.reshape.default, aten.view.default, aten.unflatten.int):
        return None
    x, rank = pairs.args[0], val(pairs).dim()
    pair_shape = [*(str(s) for s in val(x).shape[:-1]), str(val(x).shape[-1] // 2), "2"]
    if dim not in (-1, rank - 1) or [str(s) for s in val(pairs).shape] != pair_shape or index not in (0, 1):
        return None
    return x, ("even", "odd")[index]


def other_factor(product: Node, one: Node):
    return product.args[1] if product.args[0] is one else product.args[0]


def factors_of(product: Node) -> tuple[Node, str, Node, Node] | None:
    """(x, which part of it, that part, the table) of part * table."""
    for part in product.args[:2]:
        if (found := part_of(part)) is not None and val(found[0]).dim() > 1:
            table = other_factor(product, part)
            if is_table(table):
                return *found, part, table
    return None


def is_table(value) -> bool:
    return isinstance(value, Node) and is_call(
        table_root(value), aten.cos.default, aten.sin.default, *_LOOKUPS
    )


def is_scaled(node) -> bool:
    return is_call(node, aten.mul.Tensor) and isinstance(node.args[1], (int, float))


def table_root(node):
    """Walk up from a cos or sin factor to the trigonometric function, or the lookup, that it came from."""
    while True:
        if is_call(node, *_STEPS) or is_scaled(node):
            node = node.args[0]
        elif is_call(node, aten.cat.default, aten.stack.default) and len(set(node.args[0])) == 1:
            node = node.args[0][0]
        elif is_call(node, operator.getitem) and is_call(node.args[0], *_SPLITS):
            node = node.args[0].args[0]
        else:
            return node


def reason_against_tables(cos, sin) -> str | None:
    """Why two factors are not the cosine and the sine of the same positions."""
    roots = table_root(cos), table_root(sin)
    if is_call(roots[0], *_LOOKUPS) and is_call(roots[1], *_LOOKUPS):
        if cos is sin:
            return "the same table is used for cosine and sine"
        return (
            None
            if _looked_up(roots[0]) == _looked_up(roots[1])
            else "the tables are looked up at different places"
        )
    if not is_call(roots[0], aten.cos.default) or not is_call(roots[1], aten.sin.default):
        return "the factors are not the cosine and the sine of positions"
    return None if roots[0].args[0] is roots[1].args[0] else "cosine and sine are taken of different angles"


def _looked_up(lookup: Node) -> str:
    """Where a table is read."""
    place = {
        aten.index.Tensor: 1,
        aten.embedding.default: 1,
        aten.index_select.default: 2,
        aten.gather.default: 2,
    }
    return str(lookup.args[place[lookup.target]])


def table_users(table: Node) -> list[Node]:
    """Nodes that use a cosine table after what prepares it: casts, scalings, repetitions, views."""
    found, queue, seen = [], [table], set()
    while queue:
        for user in queue.pop().users:
            if user in seen:
                continue
            seen.add(user)
            same = is_call(user, aten.cat.default, aten.stack.default) and len(set(user.args[0])) == 1
            (queue if is_call(user, *_STEPS) or is_scaled(user) or same else found).append(user)
    return found
