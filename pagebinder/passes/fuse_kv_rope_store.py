"""RoPE of a latent row's trailing channels + its write to the cache in one op (DeepSeek-V4).

Matches:
    rows = cat([kv[..., :-2P], rope(kv[..., -2P:], cos, sin, "interleaved")])
    latent_cache_write(rows [T, D], cache, slots, layout, rope_dim)         nothing else reads the rotated rows
Replaces with:
    kv_rope_quant_store(kv [T, D], cos [T, P], sin [T, P], cache, slots, layout, rope_dim)

The op rounds rotated rows to what the cache stores, at once; where the graph rounds them to something else before, it
is not the same.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.graph_tools import aten, calls, describe, finish, insert_call, is_call, val
from pagebinder.passes.trailing_rope import (
    ROPE,
    VIEWS,
    NotThisRope,
    TrailingRope,
    only_reader,
    refusal,
    require,
    table_rows,
    token_rows,
    trailing_rope,
    uncast,
)
from pagebinder.report import Match, PassResult

PATTERN = "kv_rope_quant_store"


def fuse_kv_rope_store(gm: GraphModule) -> PassResult:
    """Rewrite every write of rotated rows; a write of something else is refused with what was found."""
    result = PassResult(name="fuse_kv_rope_store")
    for write in calls(gm.graph, torch.ops.pagebinder.latent_cache_write.default):
        try:
            site = _site(write)
        except NotThisRope as reason:
            result.refusals.append(refusal(PATTERN, write, reason))
            continue
        result.matches.append(Match(pattern=PATTERN, **describe(_rewrite(gm, write, site))))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _site(write: Node) -> TrailingRope:
    rows, reader = write.args[0], write
    while is_call(rows, aten.select.int, *VIEWS) and val(rows).shape[-1] == val(rows.args[0]).shape[-1]:
        require(only_reader(rows) is reader, "the rotated rows are read elsewhere, too")
        rows, reader = rows.args[0], rows
    parts = rows.args[0] if is_call(rows, aten.cat.default) else ()
    rope = uncast(parts[-1]) if len(parts) == 2 else None
    require(is_call(rope, ROPE), "the rows that are written are not rotated in their trailing channels")
    require(only_reader(rows) is reader, "the rotated rows are read elsewhere, too")
    site = trailing_rope(rope, heads=False)
    stored = val(write.args[1]).dtype if write.kwargs.get("layout", "plain") == "plain" else torch.bfloat16
    dtype = val(rows).dtype
    require(
        dtype in (stored, torch.float32), f"the rotated rows are rounded to {dtype} before they are stored"
    )
    return site


def _rewrite(gm: GraphModule, write: Node, site: TrailingRope) -> Node:
    kv = token_rows(gm.graph, write, site.x, 2)
    angles = (table_rows(gm.graph, site.cos), table_rows(gm.graph, site.sin))
    op = torch.ops.pagebinder.kv_rope_quant_store.default
    fused = insert_call(gm.graph, write, op, (kv, *angles, *write.args[1:]), dict(write.kwargs))
    gm.graph.erase_node(write)
    return fused
