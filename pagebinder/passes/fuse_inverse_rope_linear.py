"""Inverse RoPE of the attention output + grouped output projection in one op (DeepSeek-V4).

Matches:
    turned = cat([x[..., :-2P], rope(x[..., -2P:], cos, -sin, "interleaved")])        x [.., T, H, D]
    out = bmm(turned.view(T, g, K).transpose(0, 1), weight.view(g, r, K).transpose(1, 2)).transpose(0, 1)
Replaces with:
    out = inverse_rope_grouped_linear(x [T, H, D], cos, sin, weight [g * r, K], groups=g)

Nothing else may read what lies between. With `fp8` the op quantises its rows: that changes numbers, and is only done
where the caller asks for it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.linear.inverse_rope_grouped import QUANT_CHANNELS
from pagebinder.graph_tools import IDENTITIES, aten, describe, finish, insert_call, is_call, val
from pagebinder.passes.trailing_rope import (
    RESHAPES,
    VIEWS,
    NotThisRope,
    TrailingRope,
    only_reader,
    refusal,
    require,
    reroute,
    rotated_parts,
    table_rows,
    token_rows,
    trailing_rope,
)
from pagebinder.report import Match, PassResult

PATTERN = "inverse_rope_grouped_linear"


def fuse_inverse_rope_linear(gm: GraphModule, *, fp8: bool = False) -> PassResult:
    """Rewrite every value that is turned back and projected by groups; others that are turned back are refused.

    Args:
        fp8: the activations pass through e4m3, where a group's channels are a multiple of 128.
    """
    result = PassResult(name="fuse_inverse_rope_linear")
    for rope, _ in rotated_parts(gm.graph):
        sin = _negated(rope.args[2])
        try:
            site = trailing_rope(rope, heads=True)
            product, weight, groups = _projection(site)
            require(sin is not None, "sin is not negated: the value is turned on, not back")
            require(
                not fp8 or val(weight).shape[1] % QUANT_CHANNELS == 0, "its groups cannot be quantised by 128"
            )
        except NotThisRope as reason:
            if sin is None and not _leads_to_groups(rope):
                continue  # an ordinary rotation
            result.refusals.append(refusal(PATTERN, rope, reason))
            continue
        fused = _rewrite(gm, site, sin, product, weight, {"groups": groups, "fp8": fp8})
        result.matches.append(Match(pattern=PATTERN, detail=f"{groups} groups", **describe(fused)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _negated(sin: Node) -> Node | None:
    """s of a table -s, looked for behind its views."""
    while is_call(sin, *VIEWS):
        sin = sin.args[0]
    return sin.args[0] if is_call(sin, aten.neg.default) else None


def _leads_to_groups(rope: Node) -> bool:
    """Is a grouped product behind the rotation?"""
    try:
        return bool(_projection(trailing_rope(rope, heads=True)))
    except NotThisRope:
        return False


def _projection(site: TrailingRope) -> tuple[Node, Node, int]:
    """(product [T, g, r], weight [g * r, K], g) of the grouped linear layer that reads the site.

    Raises:
        NotThisRope: something else reads it, or reads it, too.
    """
    rows = site.output
    while is_call(only_reader(rows), *VIEWS, *IDENTITIES):
        rows = only_reader(rows)
    across = only_reader(rows)
    require(
        _swaps(across, 0, 1) and val(across).dim() == 3,
        "what is turned back is not read by one grouped product",
    )
    groups, _, inner = val(across).shape
    heads, width = val(site.x).shape[-2:]
    require(heads % groups == 0 and groups * inner == heads * width, "groups are not made of whole heads")
    product = only_reader(across)
    require(
        is_call(product, aten.bmm.default) and product.args[0] is across,
        "what is turned back is not read by one grouped product",
    )
    weight = _grouped_weight(product.args[1], groups)
    require(val(weight).dtype is val(site.x).dtype, "the weight has another dtype")
    out = only_reader(product)
    require(_swaps(out, 0, 1), "the product's groups are not put behind its tokens")
    return out, weight, groups


def _grouped_weight(node: Node, groups: int) -> Node:
    """weight [g * r, K] of transpose(view(weight, [g, r, K]), 1, 2)."""
    reason = "the weight is not a parameter [groups * r, K]"
    require(_swaps(node, 1, 2) and is_call(node.args[0], *RESHAPES), reason)
    weight = node.args[0].args[0]
    require(weight.op == "get_attr" and val(weight).dim() == 2, reason)
    require(val(weight).shape[1] == val(node.args[0]).shape[2] and val(node).shape[0] == groups, reason)
    return weight


def _swaps(node, a: int, b: int) -> bool:
    """Is it a transposition of these dimensions?"""
    if not is_call(node, aten.transpose.int):
        return False
    rank = val(node).dim()
    return {node.args[1] % rank, node.args[2] % rank} == {a, b}


def _rewrite(
    gm: GraphModule, site: TrailingRope, sin: Node, product: Node, weight: Node, options: dict
) -> Node:
    graph = gm.graph
    while is_call(only_reader(product), *VIEWS):  # to [.., T, g * r], which most models make of it at once
        product = only_reader(product)
    x = token_rows(graph, product, site.x, 3)
    angles = (table_rows(graph, site.cos), table_rows(graph, sin))
    op = torch.ops.pagebinder.inverse_rope_grouped_linear.default
    fused = insert_call(graph, product, op, (x, *angles, weight), options)
    reroute(graph, product, fused)
    return fused
