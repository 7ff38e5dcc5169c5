"""Recurrences and short convolutions over one sequence -> the same over requests, with states in a paged cache.

Matches:
    out = short_conv(x [T, C], ...) | gated_delta_rule(q [T, G, Dk], ...) | ssd(x [T, H, P], ...) | ...
Replaces with:
    out = paged_<op>(same operands, kv_cache_i, block_table_g, seq_lens, query_start_loc, block_size=B, ...)

i is the layer's number, g its KV group. There is no slot mapping: a block holds one state, not rows of tokens, and
the op itself reads the state that a request starts from and writes those at block boundaries.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.recurrent.define import RECURRENCES
from pagebinder.graph_tools import insert_call
from pagebinder.passes.layer_states import (
    Paging,
    add_block_table,
    add_caches,
    add_request_lengths,
    rewrite_stateful,
)
from pagebinder.report import PassResult

PAGED = {
    torch.ops.pagebinder.short_conv.default: torch.ops.pagebinder.paged_short_conv.default,
    torch.ops.pagebinder.gated_delta_rule.default: torch.ops.pagebinder.paged_gated_delta_rule.default,
    torch.ops.pagebinder.ssd.default: torch.ops.pagebinder.paged_ssd.default,
    **{op: recurrence.paged for op, recurrence in RECURRENCES.items()},
}
PATTERNS = {op: paged._opname for op, paged in PAGED.items()}


def page_recurrent(gm: GraphModule, *, paging: Paging) -> PassResult:
    """Rewrite every recurrence and short convolution."""
    return rewrite_stateful(gm, paging, "page_recurrent", PATTERNS, _paged_form)


def _paged_form(gm: GraphModule, node: Node, paging: Paging) -> Node:
    _, group, block_size = paging.of(node)
    (cache,) = add_caches(gm, paging, node)
    table = add_block_table(gm, group)
    lens, starts = add_request_lengths(gm)
    args = (*node.args, cache, table, lens, starts)
    return insert_call(gm.graph, node, PAGED[node.target], args, {"block_size": block_size, **node.kwargs})
