"""Weightless norm of the query heads + RoPE of their trailing channels in one op (DeepSeek-V4).

Matches:
    n = rms_norm(q [.., T, H, D], None, eps, "none")            nothing else reads n
    out = cat([n[..., :-2P], rope(n[..., -2P:], cos, sin, "interleaved")])
Replaces with:
    out = q_norm_rope(q [T, H, D], cos [T, P], sin [T, P], eps)

Both round after the norm and after the rotation, so the result does not change.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.graph_tools import arg, describe, finish, insert_call, is_call
from pagebinder.passes.trailing_rope import (
    NotThisRope,
    TrailingRope,
    refusal,
    require,
    reroute,
    rotated_parts,
    table_rows,
    token_rows,
    trailing_rope,
)
from pagebinder.report import Match, PassResult

PATTERN = "q_norm_rope"
NORM = torch.ops.pagebinder.rms_norm.default


def fuse_q_norm_rope(gm: GraphModule) -> PassResult:
    """Rewrite every norm of heads whose trailing channels turn; other rotated norms are refused with the reason."""
    result = PassResult(name="fuse_q_norm_rope")
    for rope, norm in rotated_parts(gm.graph):
        if not is_call(norm, NORM):
            continue
        try:
            site = _site(rope, norm)
        except NotThisRope as reason:
            result.refusals.append(refusal(PATTERN, rope, reason))
            continue
        result.matches.append(Match(pattern=PATTERN, **describe(_rewrite(gm, site, norm))))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _site(rope: Node, norm: Node) -> TrailingRope:
    require(arg(norm, 1, "weight") is None and norm.kwargs["tail"] == "none", "the norm has a weight")
    site = trailing_rope(rope, heads=True)
    require(site.is_only_reader(), "the normed value is read elsewhere, too")
    return site


def _rewrite(gm: GraphModule, site: TrailingRope, norm: Node) -> Node:
    q = token_rows(gm.graph, site.output, norm.args[0], 3)
    angles = (table_rows(gm.graph, site.cos), table_rows(gm.graph, site.sin))
    op = torch.ops.pagebinder.q_norm_rope.default
    fused = insert_call(gm.graph, site.output, op, (q, *angles), {"eps": norm.kwargs["eps"]})
    reroute(gm.graph, site.output, fused)
    return fused
