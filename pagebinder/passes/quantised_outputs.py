"""What the fusions of an op with the FP8 quantisation of its result have in common.

    y = f(...)
    codes, scale = scaled_fp8_quant(y, static, granularity=g)           y read by nothing else

f is a norm, a gated activation or attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import describe, finish, insert_call, is_call, source_line, val
from pagebinder.report import Match, PassResult, Refusal

QUANT = torch.ops.pagebinder.scaled_fp8_quant.default


@dataclass(frozen=True)
class Quantisation:
    """A call of `scaled_fp8_quant`: its static scale (None: dynamic) and its granularity."""

    node: Node
    static_scale: Node | None
    granularity: str


def fuse_quantisations(
    gm: GraphModule, pattern: str, candidates: Iterable[Node],
    find: Callable[[Node], Quantisation | str], fuse: Callable[[GraphModule, Node, Quantisation], Node],
) -> PassResult:  # fmt: skip
    """The pass `fuse_<pattern>`: every candidate with the quantisation that `find` returns becomes what `fuse` makes;
    a reason instead is a refusal."""
    result = PassResult(name=f"fuse_{pattern}")
    for node in candidates:
        found = find(node)
        if isinstance(found, str):
            where = {"source_line": source_line(node), **describe(node)}
            result.refusals.append(Refusal(pattern=pattern, reason=found, **where))
            continue
        fused = fuse(gm, node, found)
        result.matches.append(Match(pattern=pattern, detail=found.granularity, **describe(fused)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def quantisation_of(value: Node) -> Quantisation | str:
    """The quantisation that alone reads a value, or the reason why there is none."""
    readers = [user for user in value.users if is_call(user, QUANT)]
    if not readers:
        return "its result is not quantised"
    if len(value.users) > 1:
        return "its result is read elsewhere, too"
    (node,) = readers
    return Quantisation(node, node.args[1] if len(node.args) > 1 else None, node.kwargs["granularity"])


def insert_quantising(
    gm: GraphModule, like: Node, target, operands: tuple, options: dict, quantisation: Quantisation
) -> Node:
    """Call an op that returns (codes, scale, ...) before `like`; a static scale is fetched there."""
    if quantisation.static_scale is not None:
        like.prepend(quantisation.static_scale)
    return insert_call(gm.graph, like, target, operands, {**options, "granularity": quantisation.granularity})


def take_result(gm: GraphModule, like: Node, fused: Node, index: int, old: Node) -> Node:
    """Users of `old` get result number `index` of a call, fetched before `like`."""
    new = insert_call(gm.graph, like, operator.getitem, (fused, index), value=val(old))
    old.replace_all_uses_with(new)
    return new


def part_of(call: Node, index: int) -> Node | None:
    """The node that fetches result number `index` of a call; None if nothing does."""
    return next((u for u in call.users if is_call(u, operator.getitem) and u.args[1] == index), None)
