"""Attention without a cache -> cache write + paged attention over the layer's pages.

Matches:
    out = attention(q [T, H, D], k [T, G, D], v [T, G, Dv], sinks, slopes, scale, window, chunk, soft_cap, causal)
Replaces with:
    kv_cache_write(k, v, kv_cache_i, slot_mapping_g)
    out = paged_attention(q, kv_cache_i, block_table_g, seq_lens, query_start_loc, sinks, slopes, ...)

Matches:
    out = relative_attention(q, k, v, bias, scale, num_behind, causal)
Replaces with:
    the same write, and paged_relative_attention(q, kv_cache_i, block_table_g, seq_lens, query_start_loc, bias, ...)

i is the layer's number, g its KV group: layers of a group share one block table and one slot mapping.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.graph_tools import insert_call
from pagebinder.passes.layer_states import (
    Paging,
    add_block_table,
    add_caches,
    add_request_lengths,
    add_slots,
    rewrite_stateful,
)
from pagebinder.report import PassResult

PATTERN = "paged_attention"
PAGED_FORMS = {
    torch.ops.pagebinder.attention.default: torch.ops.pagebinder.paged_attention.default,
    torch.ops.pagebinder.relative_attention.default: torch.ops.pagebinder.paged_relative_attention.default,
}


def page_attention(gm: GraphModule, *, paging: Paging) -> PassResult:
    """Rewrite every attention op."""
    return rewrite_stateful(gm, paging, "page_attention", dict.fromkeys(PAGED_FORMS, PATTERN), _paged_form)


def _paged_form(gm: GraphModule, node: Node, paging: Paging) -> Node:
    state, group, _ = paging.of(node)
    q, k, v, *optional = node.args
    (cache,) = add_caches(gm, paging, node)
    slots = add_slots(gm, group)
    table = add_block_table(gm, group)
    lens, starts = add_request_lengths(gm)
    insert_call(gm.graph, node, torch.ops.pagebinder.kv_cache_write.default, (k, v, cache, slots))
    return insert_call(
        gm.graph,
        node,
        PAGED_FORMS[node.target],
        (q, cache, table, lens, starts, *optional),
        {"head_dim_v": state.head_dim_v, **node.kwargs},
    )
