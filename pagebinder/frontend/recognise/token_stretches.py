"""Tokens behind zeros: what pads, cuts and constants in front of them make of a sequence.

x                        a b c d
pad(x, (2, 0))           0 0 a b c d        left = 2
pad(x, (2, 0))[.., :4]   0 0 a b            left = 2, cut: nothing may be put behind it any more
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from pagebinder.frontend.mask_values import fill_of
from pagebinder.frontend.token_dims import token_dims
from pagebinder.graph_tools import arg, aten, is_call, val

PADS = (aten.pad.default, aten.constant_pad_nd.default)
CATS = (aten.cat.default, aten.concat.default, aten.concatenate.default)
_END = 1 << 62


@dataclass(frozen=True)
class Stretch:
    """Entry i along `dim` is x[i - left], and `fill` where x has none. `is_cut`: the last ones of x are gone."""

    x: Node
    dim: int
    left: int = 0
    is_cut: bool = False
    fill: float | None = None


def num_tokens(graph: torch.fx.Graph) -> object:
    return next(n for n in graph.nodes if n.op == "placeholder").meta["val"].shape[0].node.expr


def is_of_tokens(node: Node) -> bool:
    """One entry for each token along one dimension."""
    dims = token_dims(node)
    return len(dims) == 1 and val(node).shape[dims[0]].node.expr == num_tokens(node.graph)


def stretch_of(node: Node) -> Stretch | None:
    """The tokens behind pads, cuts and zeros; None: something else happens to them."""
    if is_of_tokens(node) and not (is_call(node, *PADS, *CATS, aten.slice.Tensor) and parts_of(node)):
        return Stretch(node, token_dims(node)[0])
    return parts_of(node)


def parts_of(node: Node) -> Stretch | None:
    if is_call(node, *PADS):
        return _padded(node)
    if is_call(node, aten.slice.Tensor):
        return _sliced(node)
    return _after_zeros(node) if is_call(node, *CATS) else None


def _padded(node: Node) -> Stretch | None:
    x, pads = node.args[:2]
    inner = stretch_of(x)
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
    inner = stretch_of(x)
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
    inner = stretch_of(parts[-1])
    fills = {fill_of(n) for n in parts[:-1]}
    if inner is None or inner.dim != dim or len(fills) != 1 or None in fills:
        return None
    return _with_pads(inner, sum(val(n).shape[dim] for n in parts[:-1]), 0, fills.pop())
