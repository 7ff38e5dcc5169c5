"""Causal convolutions over the tokens, and tokens shifted by some places, as own code writes them.

Matches:
    conv1d(x [1, C, T], w, padding=p)[.., :T]        p and zeros put before x: K - 1 at least, so no later token
    pad(x, (n, -n)) | cat(zeros n, x[.., :-n]) | pad(x, (n, 0))[.., :T]       along the tokens
Replaces with:
    pagebinder.short_conv(x [T, C], taps [C, L + 1], bias, activation=None)

    zeros before x           0 0 0 a b c d         L = 3 of them, K = 3 taps, dilation 1
    result t = 2 meets         |w0 w1 w2|          taps [w0 w1 w2 0]: the last one meets the token itself
    a shift by n is the convolution with taps [1, 0, .., 0], n zeros; of token ids it is one of float32, exactly

A convolution across channels takes the K tokens apart by taps of one 1 each, and multiplies them with its weights as
one linear layer. What comes behind a convolution token by token before it is cut (an activation, a transpose) stays.
Shifts multiply with ones and zeros: an infinite value makes its neighbours NaN, which no step passes over.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.recognise.token_stretches import CATS, PADS, is_of_tokens, parts_of, stretch_of
from pagebinder.frontend.token_dims import tensor_inputs, token_dims
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
    source_line,
    val,
)
from pagebinder.report import Match, PassResult, Refusal

PATTERN = "causal_conv"
SHORT_CONV = torch.ops.pagebinder.short_conv.default
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_VIEWS = (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, *CASTS, *IDENTITIES)
_TRANSPOSES = (aten.transpose.int, aten.permute.default, aten.mT.default)
_MOST_FILL = 1 << 23


class NotCausalConv(Exception):
    """The reason why a site was refused."""


def recognise_causal_conv(gm: GraphModule) -> PassResult:
    """Rewrite every convolution and shift along the tokens that sees no later token; refuse the others."""
    result = PassResult(name="recognise_causal_conv")
    result.changed = _drop_whole_parts(gm)
    sites = [
        (aten.conv1d.default, _rewrite_conv),
        *((op, _rewrite_shift) for op in (*PADS, *CATS, aten.slice.Tensor)),
    ]
    for target, rewrite in sites:
        for node in calls(gm.graph, target):
            try:
                op = rewrite(gm, node)
            except NotCausalConv as miss:
                where = describe(node)
                result.refusals.append(
                    Refusal(pattern=PATTERN, reason=str(miss), source_line=source_line(node), **where)
                )
                continue
            if op is not None:
                taps = val(op.args[1]).shape[1]
                result.matches.append(Match(pattern=PATTERN, detail=f"{taps} taps", **describe(op)))
    result.changed |= bool(result.matches)
    if result.changed:
        finish(gm)
    return result


def _drop_whole_parts(gm: GraphModule) -> bool:
    """Zeros put before the tokens and taken away again: pad(x, (3, 0))[.., 3:] is x. Was there such a part?"""
    found = False
    for node in calls(gm.graph, aten.slice.Tensor):
        stretch = parts_of(node) if is_of_tokens(node) else None
        if stretch is not None and stretch.left == 0 and stretch.x is not node.args[0]:
            node.replace_all_uses_with(stretch.x)
            gm.graph.erase_node(node)
            found = True
    return found


# Shifts


def _rewrite_shift(gm: GraphModule, node: Node) -> Node | None:
    """The convolution that a shift became; None: it is no shift, or a part of one that comes later."""
    if not is_of_tokens(node) or (stretch := parts_of(node)) is None or stretch.left == 0:
        return None
    x, dtype, fill = stretch.x, val(stretch.x).dtype, stretch.fill or 0
    is_whole = dtype in (torch.int32, torch.int64)
    what = f"tokens are shifted by {stretch.left} places"
    if is_whole and not (_are_ids(x) and fill == int(fill) and abs(fill) < _MOST_FILL):
        raise NotCausalConv(f"{what}, as whole numbers that are not their ids, or behind {fill}")
    if not is_whole and (fill or dtype not in _FLOATS):
        raise NotCausalConv(f"{what}, as {dtype} with {fill} before the first")
    fill = int(fill)
    if is_whole:  # exact in float32: no vocabulary has 2^23 tokens
        x = insert_call(gm.graph, node, aten.sub.Tensor, (x, fill)) if fill else x
        x = insert_call(gm.graph, node, aten.to.dtype, (x, torch.float32))
    rows = _rows(gm, node, x)
    taps = _one_tap(gm, node, val(rows).shape[1], rows, 0, stretch.left + 1)
    op = insert_call(gm.graph, node, SHORT_CONV, (rows, taps, None), {"activation": None})
    out = _as_before(gm, node, op, x)
    if is_whole:
        out = insert_call(gm.graph, node, aten.to.dtype, (out, dtype))
        out = insert_call(gm.graph, node, aten.add.Tensor, (out, fill)) if fill else out
    node.replace_all_uses_with(out)
    gm.graph.erase_node(node)
    return op


def _are_ids(x: Node) -> bool:
    while is_call(x, *_VIEWS):
        x = x.args[0]
    return x.op == "placeholder" and x.target == "input_ids"


# Convolutions


def _rewrite_conv(gm: GraphModule, conv: Node) -> Node | None:
    x, weight = conv.args[:2]
    if not token_dims(x):
        return None
    if token_dims(x) != [val(x).dim() - 1] or val(x).dim() != 3 or val(x).shape[0] != 1 or token_dims(weight):
        raise NotCausalConv("a convolution takes [1, channels, tokens] and weights of its own")
    if val(weight).shape[2] == 1:
        return None  # a product with the channels of each token
    source, left = _source_of(conv, x)
    width, groups = val(x).shape[1], arg(conv, 6, "groups", 1)
    dilation, stride = _one(arg(conv, 5, "dilation", 1)), _one(arg(conv, 3, "stride", 1))
    reach = (val(weight).shape[2] - 1) * dilation
    if stride != 1:
        raise NotCausalConv(f"a convolution with stride {stride} has not a row for each token")
    if left < reach:
        raise NotCausalConv(
            f"a convolution with {left} zeros before the tokens and {reach + 1} taps looks at later tokens"
        )
    if groups not in (1, width) or (groups == width and val(conv).shape[1] != width):
        raise NotCausalConv(f"a convolution of {width} to {val(conv).shape[1]} channels in {groups} groups")
    cuts, between = ([], []) if is_of_tokens(conv) else _cuts_behind(conv)
    rows = _rows(gm, conv, source)
    if groups == width:
        op = _depthwise(gm, conv, rows, dilation, left)
        out = op
    else:
        op, out = _across_channels(gm, conv, rows, dilation, left)
    out = insert_call(gm.graph, conv, aten.t.default, (out,))
    out = insert_call(gm.graph, conv, aten.unsqueeze.default, (out, 0))
    if val(out).dtype is not val(conv).dtype:
        out = insert_call(gm.graph, conv, aten.to.dtype, (out, val(conv).dtype))
    now = {conv: out}
    for node in between:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: now.get(n, n))
        now[node] = insert_call(gm.graph, node, node.target, args, kwargs)
    if not cuts:
        conv.replace_all_uses_with(out)
    for node in cuts:
        node.replace_all_uses_with(now[node.args[0]])
    for node in (*cuts, *reversed(between), conv):
        gm.graph.erase_node(node)
    return op


def _source_of(conv: Node, x: Node) -> tuple[Node, int]:
    """What is convolved, and how many zeros come before its first token."""
    padding = _one(arg(conv, 4, "padding", 0))
    if is_of_tokens(x):
        return x, padding
    stretch = stretch_of(x)
    if stretch is None or stretch.is_cut or (stretch.fill and stretch.left):
        raise NotCausalConv("a convolution of something else than the tokens behind zeros")
    return stretch.x, stretch.left + padding


def _cuts_behind(conv: Node) -> tuple[list[Node], list[Node]]:
    """(the slices that take the first T entries, what is computed token by token before them, in order)."""
    cuts: dict[Node, None] = {}
    dims, others, queue = (
        {conv: 2},
        set(),
        [conv],
    )  # others: not understood yet, for want of another operand perhaps
    while queue:
        node = queue.pop()
        for user in node.users:
            if _takes_first_tokens(user, node, dims[node]):
                cuts[user] = None
            elif user not in dims and (dim := _moved(user, node, dims)) is not None:
                dims[user] = dim
                queue.append(user)
            else:
                others.add(user)
    if others - set(dims):
        raise NotCausalConv("what a convolution computes beyond the tokens is used")
    order = {node: i for i, node in enumerate(conv.graph.nodes)}
    return list(cuts), sorted(dims.keys() - {conv}, key=order.__getitem__)


def _takes_first_tokens(cut: Node, node: Node, dim: int) -> bool:
    if not is_call(cut, aten.slice.Tensor, aten.narrow.default) or cut.args[0] is not node:
        return False
    right_place = arg(cut, 1, "dim", 0) % val(node).dim() == dim
    from_first = (arg(cut, 2, "start", 0) or 0) == 0
    every = is_call(cut, aten.narrow.default) or arg(cut, 4, "step", 1) == 1
    return right_place and from_first and every and is_of_tokens(cut)


def _moved(user: Node, node: Node, dims: dict[Node, int]) -> int | None:
    """Where the tokens of `node` are in `user`, which treats each alone; None: it is not known to. `dims`: where
    they are in what is known already."""
    dim = dims[node]
    rank = val(node).dim() if isinstance(user.meta.get("val"), torch.Tensor) else 0
    if is_call(user, *_TRANSPOSES):
        if user.target is aten.permute.default:
            return [d % rank for d in user.args[1]].index(dim)
        a, b = (rank - 2, rank - 1) if user.target is aten.mT.default else (d % rank for d in user.args[1:3])
        return {a: b, b: a}.get(dim, dim)
    is_pointwise = isinstance(user.target, torch._ops.OpOverload) and torch.Tag.pointwise in user.target.tags
    others = [n for n in tensor_inputs(user) if n is not node and token_dims(n)]
    aligned = all(dims.get(n) == dim and val(n).dim() == rank for n in others)
    alone = is_pointwise and rank == user.meta["val"].dim() and aligned
    return dim if alone and len(token_dims(user)) == 1 else None


def _depthwise(gm: GraphModule, conv: Node, rows: Node, dilation: int, left: int) -> Node:
    taps = insert_call(gm.graph, conv, aten.squeeze.dim, (conv.args[1], 1))
    if dilation > 1:
        width, count = val(taps).shape
        taps = insert_call(gm.graph, conv, aten.unsqueeze.default, (taps, -1))
        taps = insert_call(gm.graph, conv, aten.constant_pad_nd.default, (taps, [0, dilation - 1], 0.0))
        taps = insert_call(gm.graph, conv, aten.reshape.default, (taps, [width, count * dilation]))
        taps = insert_call(gm.graph, conv, aten.slice.Tensor, (taps, 1, 0, (count - 1) * dilation + 1))
    more = left + 1 - val(taps).shape[1]
    if more:
        taps = insert_call(gm.graph, conv, aten.constant_pad_nd.default, (taps, [0, more], 0.0))
    bias = arg(conv, 2, "bias", None)
    return insert_call(gm.graph, conv, SHORT_CONV, (rows, taps, bias), {"activation": None})


def _across_channels(gm: GraphModule, conv: Node, rows: Node, dilation: int, left: int) -> tuple[Node, Node]:
    """[T, C K] of the tokens that each result meets, side by side, times the weights as [out, C K]."""
    graph, (out, width, count) = gm.graph, val(conv.args[1]).shape
    wide = insert_call(graph, conv, aten.repeat_interleave.self_int, (rows, count, 1))
    places = [_one_tap(gm, conv, 1, rows, j * dilation, left + 1) for j in range(count)]
    taps = insert_call(graph, conv, aten.cat.default, (places * width, 0))
    op = insert_call(graph, conv, SHORT_CONV, (wide, taps, None), {"activation": None})
    weight = insert_call(graph, conv, aten.reshape.default, (conv.args[1], [out, width * count]))
    return op, insert_call(graph, conv, aten.linear.default, (op, weight, arg(conv, 2, "bias", None)))


# Layouts


def _one_tap(gm: GraphModule, like: Node, width: int, rows: Node, place: int, count: int) -> Node:
    """[width, count] for `rows`: a one at `place`, zeros elsewhere."""
    options = {"dtype": val(rows).dtype, "device": val(rows).device}
    ones = insert_call(gm.graph, like, aten.full.default, ([width, 1], 1.0), options)
    pads = [place, count - 1 - place]
    return insert_call(gm.graph, like, aten.constant_pad_nd.default, (ones, pads, 0.0))


def _rows(gm: GraphModule, like: Node, x: Node) -> Node:
    """x [.., T, ..] as [T, everything else]."""
    (dim,), rank = token_dims(x), val(x).dim()
    if rank == 1:
        return insert_call(gm.graph, like, aten.unsqueeze.default, (x, 1))
    order = [dim, *(d for d in range(rank) if d != dim)]
    if order != list(range(rank)):
        x = insert_call(gm.graph, like, aten.permute.default, (x, order))
    return x if rank == 2 else insert_call(gm.graph, like, aten.flatten.using_ints, (x, 1))


def _as_before(gm: GraphModule, like: Node, rows: Node, x: Node) -> Node:
    """`rows` [T, everything else] laid out as x."""
    (dim,), shape = token_dims(x), val(x).shape
    if len(shape) == 1:
        return insert_call(gm.graph, like, aten.squeeze.dim, (rows, 1))
    others = [d for d in range(len(shape)) if d != dim]
    if len(shape) > 2:
        rows = insert_call(gm.graph, like, aten.unflatten.int, (rows, 1, [shape[d] for d in others]))
    back = [1 + others.index(d) if d != dim else 0 for d in range(len(shape))]
    if back == list(range(len(shape))):
        return rows
    return insert_call(gm.graph, like, aten.permute.default, (rows, back))


def _one(value) -> int:
    """A number, or a list of one."""
    return value if isinstance(value, int) else value[0]
