"""RoPE of a value's trailing channels, as it stands in a graph: what the fusions of DeepSeek-V4 have in common.

    kept = x[..., :D - 2P]      turned = rope(cast(x[..., D - 2P:]), cos, sin, style="interleaved")
    out = cat([kept, cast(turned)], -1)

Parts are slices of x or come from one split.

T tokens, D width, P pairs of channels. x is [T, D] or [T, H, D] behind leading ones, the tables are [T, P] with ones
where heads are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from pagebinder.graph_tools import CASTS, arg, aten, calls, describe, insert_call, is_call, source_line, val
from pagebinder.report import Refusal

ROPE = torch.ops.pagebinder.rope.default
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
# What leaves the order of elements alone.
VIEWS = (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.flatten.using_ints, aten.alias.default)


class NotThisRope(Exception):
    """Why a rotation is not one of trailing channels as above."""


@dataclass(frozen=True)
class Part:
    """Channels [begin, end) of the last dimension of x; `reader` is the node that reads x: a slice, or a split."""

    x: Node
    begin: int
    end: int
    reader: Node


@dataclass(frozen=True)
class TrailingRope:
    """The nodes of one site: `inner` are x's readers and what lies between them and `output`, the joined result."""

    x: Node
    cos: Node
    sin: Node
    inner: frozenset[Node]
    output: Node

    def is_only_reader(self) -> bool:
        """Does nothing else read x, or a part of it?"""
        return all(set(node.users) <= self.inner | {self.output} for node in (self.x, *self.inner))


def rotated_parts(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """(rope, x) of every rotation of a part of x."""
    for rope in calls(graph, ROPE):
        part = part_of(uncast(rope.args[0]))
        if part is not None:
            yield rope, part.x


def trailing_rope(rope: Node, *, heads: bool) -> TrailingRope:
    """The site around a rope node.

    Args:
        heads: x is [..., T, H, D]; else [..., T, D].
    Raises:
        NotThisRope: with the reason.
    """
    part, (cos, sin) = part_of(uncast(rope.args[0])), rope.args[1:3]
    require(part is not None, "what turns is no part of a row")
    require(rope.kwargs["style"] == "interleaved", f"the rotation has style {rope.kwargs['style']}")
    require(val(rope).dtype is torch.float32, "the rotation is not computed in float32")
    x, width, pairs = part.x, val(part.x).shape[-1], val(cos).shape[-1]
    require((part.begin, part.end) == (width - 2 * pairs, width), "it is not the trailing channels that turn")
    joined = only_reader(rope)
    if is_call(joined, *CASTS):
        joined = only_reader(joined)
    kept = _kept_part(joined, rope)
    require(
        kept is not None and kept.x is x and (kept.begin, kept.end) == (0, part.begin),
        "the rotated channels are not joined with the others",
    )
    require(val(joined).dtype is val(x).dtype, "the result has another dtype")
    by_token = _one_column_a_token(x, cos, heads) and _one_column_a_token(x, sin, heads)
    require(by_token, "angles do not go by token")
    inner = {kept.reader, part.reader, *joined.args[0], rope, rope.args[0], uncast(rope.args[0])}
    return TrailingRope(x, cos, sin, frozenset(inner), joined)


def refusal(pattern: str, node: Node, reason: NotThisRope) -> Refusal:
    """A site that stays as it is, with its source line."""
    return Refusal(
        pattern=pattern, reason=str(reason), **{"source_line": source_line(node), **describe(node)}
    )


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotThisRope(reason)


def uncast(node):
    """The value before one cast."""
    return node.args[0] if is_call(node, *CASTS) else node


def only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def part_of(node) -> Part | None:
    """What a node is of another one's last dimension: a slice in steps of 1, or an element of a split."""
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.split_with_sizes.default):
        split, index = node.args
        sizes, dim = split.args[1], arg(split, 2, "dim", 0)
        begin, length = sum(sizes[:index]), sizes[index]
    elif is_call(node, aten.narrow.default):
        split, (_, dim, begin, length) = node, node.args
    elif is_call(node, aten.slice.Tensor) and arg(node, 4, "step", 1) == 1:
        split, dim = node, arg(node, 1, "dim", 0)
        bounds = slice(arg(node, 2, "start"), arg(node, 3, "end"))
        width = val(node.args[0]).shape[-1]
        if not all(isinstance(v, int) for v in (width, bounds.start or 0, bounds.stop or 0)):
            return None
        begin, end, _ = bounds.indices(width)
        length = end - begin
    else:
        return None
    x = split.args[0]
    whole_numbers = isinstance(begin, int) and isinstance(length, int)
    if dim not in (-1, val(x).dim() - 1) or not whole_numbers or begin < 0:
        return None
    return Part(x, begin, begin + length, split)


def _kept_part(joined, rope: Node) -> Part | None:
    """The first of two parts that are joined in the last dimension, if the rotated one is the second."""
    if not is_call(joined, aten.cat.default) or len(joined.args[0]) != 2:
        return None
    kept, rotated = joined.args[0]
    last = arg(joined, 1, "dim", 0) in (-1, val(joined).dim() - 1)
    return part_of(kept) if last and uncast(rotated) is rope else None


def _one_column_a_token(x: Node, table: Node, heads: bool) -> bool:
    """Is the table [..1.., T, (1,) P] for x [..1.., T, (H,) D]?"""
    tokens = list(val(x).shape)[: -2 if heads else -1]
    rows = list(val(table).shape)[:-1]
    if heads and (not rows or rows.pop() != 1):
        return False
    one_sequence = len(tokens) >= 1 and all(size == 1 for size in tokens[:-1] + rows[:-1])
    return one_sequence and bool(rows) and rows[-1] == tokens[-1]


# ---- operands of the fused op ----------------------------------------------------------------------------------


def token_rows(graph: Graph, like: Node, node: Node, rank: int) -> Node:
    """[..1.., T, ...] -> the same with `rank` dimensions, made before `like` where it does not exist yet."""
    while val(node).dim() > rank and is_call(node, aten.unsqueeze.default) and node.args[1] == 0:
        node = node.args[0]
    while val(node).dim() > rank:
        node = insert_call(graph, like, aten.select.int, (node, 0, 0))
    return node


def table_rows(graph: Graph, table: Node) -> Node:
    """A table of angles as [T, P], elements of a row side by side: the node it is a view of, or one view behind that
    for all who ask."""
    pairs = val(table).shape[-1]
    while is_call(table, *VIEWS) and val(table.args[0]).shape[-1] == pairs:
        table = table.args[0]
    if val(table).dim() != 2:
        table = _behind(graph, table, aten.reshape.default, [-1, pairs])
    step = val(table).stride()[-1]
    return table if isinstance(step, int) and step == 1 else _behind(graph, table, aten.contiguous.default)


def _behind(graph: Graph, node: Node, target, *args) -> Node:
    """The call target(node, *args) right behind a node, made where it does not exist yet."""
    behind = node.next
    while behind.op in ("placeholder", "get_attr"):
        behind = behind.next
    if is_call(behind, target) and behind.args == (node, *args):
        return behind
    call = insert_call(graph, behind, target, (node, *args))
    call.meta.update({k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta})
    return call


def reroute(graph: Graph, old: Node, rows: Node) -> None:
    """Let the readers of `old` [..1.., T, ...] read `rows`, its elements with fewer or other dimensions."""
    for user in list(old.users):
        if is_call(user, aten.select.int) and user.args[1:] == (0, 0) and val(user).dim() == val(rows).dim():
            user.replace_all_uses_with(rows)
            graph.erase_node(user)
    if not old.users:
        return
    shape = list(val(old).shape)
    if len(shape) == val(rows).dim() + 1 and shape[1:] == list(val(rows).shape):
        shaped = insert_call(graph, old, aten.unsqueeze.default, (rows, 0), value=val(old))
    else:
        sizes = [size if isinstance(size, int) else -1 for size in shape]
        shaped = insert_call(graph, old, aten.reshape.default, (rows, sizes), value=val(old))
    old.replace_all_uses_with(shaped)
