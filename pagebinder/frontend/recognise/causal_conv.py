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

import itertools
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.mask_values import fill_of
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
_PADS = (aten.pad.default, aten.constant_pad_nd.default)
_CATS = (aten.cat.default, aten.concat.default, aten.concatenate.default)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_VIEWS = (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, *CASTS, *IDENTITIES)
_TRANSPOSES = (aten.transpose.int, aten.permute.default, aten.mT.default)
_END = 1 << 62
_MOST_FILL = 1 << 23


class NotCausalConv(Exception):
    """The reason why a site was refused."""


@dataclass(frozen=True)
class Stretch:
    """Entry i along `dim` is x[i - left], and `fill` where x has none. `is_cut`: the last ones of x are gone."""

    x: Node
    dim: int
    left: int = 0
    is_cut: bool = False
    fill: float | None = None


def recognise_causal_conv(gm: GraphModule) -> PassResult:
    """Rewrite every convolution and shift along the tokens that sees no later token; refuse the others."""
    result = PassResult(name="recognise_causal_conv")
    result.changed = _drop_whole_parts(gm)
    sites = [
        (aten.conv1d.default, _rewrite_conv),
        *((op, _rewrite_shift) for op in (*_PADS, *_CATS, aten.slice.Tensor)),
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
        stretch = _parts(node) if _is_of_tokens(node) else None
        if stretch is not None and stretch.left == 0 and stretch.x is not node.args[0]:
            node.replace_all_uses_with(stretch.x)
            gm.graph.erase_node(node)
            found = True
    return found


def _num_tokens(graph: torch.fx.Graph) -> object:
    return next(n for n in graph.nodes if n.op == "placeholder").meta["val"].shape[0].node.expr


def _is_of_tokens(node: Node) -> bool:
    """One entry for each token along one dimension."""
    dims = token_dims(node)
    return len(dims) == 1 and val(node).shape[dims[0]].node.expr == _num_tokens(node.graph)


# Where zeros are put before the tokens


def _stretch(node: Node) -> Stretch | None:
    """The tokens behind pads, cuts and zeros; None: something else happens to them."""
    if _is_of_tokens(node) and not (is_call(node, *_PADS, *_CATS, aten.slice.Tensor) and _parts(node)):
        return Stretch(node, token_dims(node)[0])
    return _parts(node)


def _parts(node: Node) -> Stretch | None:
    if is_call(node, *_PADS):
        return _padded(node)
    if is_call(node, aten.slice.Tensor):
        return _sliced(node)
    return _after_zeros(node) if is_call(node, *_CATS) else None


def _padded(node: Node) -> Stretch | None:
    x, pads = node.args[:2]
    inner = _stretch(x)
    is_pad = is_call(node, aten.pad.default)
    if inner is None or (is_pad and arg(node, 2, "mode", "constant") != "constant"):
        return None
    fill = arg(node, 3 if is_pad else 2, "value", None) or 0
    rank = val(x).dim()
    by_dim = {rank - 1 - i: (pads[2 * i], pads[2 * i + 1]) for i in range(len(pads) // 2)}
    left, right = by_dim.pop(inner.dim, (0, 0))
    if any(pair != (0, 0) for pair in by_dim.values()):
        return None
    if not (isinstance(left, int) and isinstance(right, int)):
        return None
    return _with_pads(inner, left, right, fill)


def _with_pads(inner: Stretch, left: int, right: int, fill: float) -> Stretch | None:
    adds = left > 0 or right > 0
    if (right > 0 and inner.is_cut) or inner.left + min(left, 0) < 0:
        return None
    if adds and inner.fill not in (None, fill):
        return None
    return Stretch(
        inner.x, inner.dim, inner.left + left, inner.is_cut or right < 0, fill if adds else inner.fill
    )


def _sliced(node: Node) -> Stretch | None:
    x = node.args[0]
    inner = _stretch(x)
    dim, start, step = (arg(node, 1, "dim", 0), arg(node, 2, "start", 0) or 0, arg(node, 4, "step", 1))
    if inner is None or dim % val(x).dim() != inner.dim or step != 1:
        return None
    if not isinstance(start, int) or start < 0:
        return None
    # Whatever the end is, it can only take away.
    end = arg(node, 3, "end", None)
    whole = end is None or (isinstance(end, int) and end >= _END)
    return _with_pads(inner, -start, 0 if whole else -1, 0)


def _after_zeros(node: Node) -> Stretch | None:
    """cat((zeros, x)): constants of one number before the tokens."""
    parts, dim = node.args[0], arg(node, 1, "dim", 0) % val(node).dim()
    of_tokens = [n for n in parts if token_dims(n)]
    if len(of_tokens) != 1 or parts[-1] is not of_tokens[0]:
        return None
    inner = _stretch(parts[-1])
    fills = {fill_of(n) for n in parts[:-1]}
    if inner is None or inner.dim != dim or len(fills) != 1 or None in fills:
        return None
    return _with_pads(inner, sum(val(n).shape[dim] for n in parts[:-1]), 0, fills.pop())


# Shifts


def _rewrite_shift(gm: GraphModule, node: Node) -> Node | None:
    """The convolution that a shift became; None: it is no shift, or a part of one that comes later."""
    if not _is_of_tokens(node) or (stretch := _parts(node)) is None or stretch.left == 0:
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
    cuts, between = ([], []) if _is_of_tokens(conv) else _cuts_behind(conv)
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
    if _is_of_tokens(x):
        return x, padding
    stretch = _stretch(x)
    if stretch is None or stretch.is_cut or (stretch.fill and stretch.left):
        raise NotCausalConv("a convolution of something else than the tokens behind zeros")
    return stretch.x, stretch.left + padding


def _cuts_behind(conv: Node) -> tuple[list[Node], list[Node]]:
    """(the slices that take the first T entries, what is computed token by token before them, in order)."""
    cuts, between, queue = [], [], [conv]
    dims = {conv: 2}
    while queue:
        node = queue.pop()
        for user in node.users:
            if is_call(user, aten.slice.Tensor) and _takes_first_tokens(user, dims[node]):
                cuts.append(user)
            elif (dim := _moved(user, node, dims[node])) is not None:
                dims[user] = dim
                between.append(user)
                queue.append(user)
            else:
                raise NotCausalConv("what a convolution computes beyond the tokens is used")
    order = {node: i for i, node in enumerate(conv.graph.nodes)}
    return cuts, sorted(set(between), key=order.__getitem__)


def _takes_first_tokens(node: Node, dim: int) -> bool:
    right_place = arg(node, 1, "dim", 0) % val(node.args[0]).dim() == dim
    from_first = (arg(node, 2, "start", 0) or 0) == 0 and arg(node, 4, "step", 1) == 1
    return right_place and from_first and _is_of_tokens(node)


def _moved(user: Node, node: Node, dim: int) -> int | None:
    """Where the tokens of `node` are in `user`, which treats each of them alone; None: it is not known to."""
    rank = val(node).dim() if isinstance(user.meta.get("val"), torch.Tensor) else 0
    if is_call(user, *_TRANSPOSES):
        if user.target is aten.permute.default:
            return [d % rank for d in user.args[1]].index(dim)
        a, b = (rank - 2, rank - 1) if user.target is aten.mT.default else (d % rank for d in user.args[1:3])
        return {a: b, b: a}.get(dim, dim)
    is_pointwise = isinstance(user.target, torch._ops.OpOverload) and torch.Tag.pointwise in user.target.tags
    others = [n for n in tensor_inputs(user) if n is not node]
    alone = is_pointwise and rank == user.meta["val"].dim() and not any(map(token_dims, others))
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
    return value if isinstance(value, int) else next(itertools.chain(value))
