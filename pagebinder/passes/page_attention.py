"""Attention without a cache -> cache write + paged attention over the layer's pages.

Matches:
    out = attention(q [T, H, D], k [T, G, D], v [T, G, Dv], sinks, slopes, scale, window, chunk, soft_cap, causal)
Replaces with:
    kv_cache_write(k, v, kv_cache_i, slot_mapping_g)
    out = paged_attention(q, kv_cache_i, block_table_g, seq_lens, query_start_loc, sinks, slopes, ...)

Matches:
    k', v' = quantized_kv(k, v, scales, codes);  out = attention(q, k', v', ...)
Replaces with:
    quantized_kv_cache_write(k, v, kv_cache_i, slot_mapping_g, scales, codes)
    out = quantized_paged_attention(q, kv_cache_i, ..., sinks, slopes, scales, codes, ...)

Matches:
    out = relative_attention(q, k, v, bias, scale, num_behind, causal)
Replaces with:
    the same write, and paged_relative_attention(q, kv_cache_i, block_table_g, seq_lens, query_start_loc, bias, ...)

Matches:
    out = lookahead_attention(q, k, v, lookahead, sinks, scale, window, soft_cap)
Replaces with:
    the same write, and paged_lookahead_attention(q, kv_cache_i, block_table_g, seq_lens, query_start_loc, lookahead,
    ...)

Matches:
    out = indexed_attention(q, k, v, indices, scale, ratio)
Replaces with:
    the same write, and paged_indexed_attention(q, kv_cache_i, block_table_g, seq_lens, query_start_loc, indices, ...)

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
from pagebinder.passes.quantize_kv import quantized_source
from pagebinder.report import PassResult

PATTERN = "paged_attention"
ours = torch.ops.pagebinder
PAGED_FORMS = {
    ours.attention.default: ours.paged_attention.default,
    ours.relative_attention.default: ours.paged_relative_attention.default,
    ours.lookahead_attention.default: ours.paged_lookahead_attention.default,
    ours.indexed_attention.default: ours.paged_indexed_attention.default,
}
NUM_OPTIONAL = 2  # operands of attention after q, k and v


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
    operands = (q, cache, table, lens, starts, *optional)
    options = {"head_dim_v": state.head_dim_v, **node.kwargs}
    stored = quantized_source(node)
    if stored is None:
        insert_call(gm.graph, node, ours.kv_cache_write.default, (k, v, cache, slots))
        return insert_call(gm.graph, node, PAGED_FORMS[node.target], operands, options)
    k, v, *scales = stored.args
    write, attend = ours.quantized_kv_cache_write.default, ours.quantized_paged_attention.default
    insert_call(gm.graph, node, write, (k, v, cache, slots, *scales), stored.kwargs)
    absent = (None,) * (NUM_OPTIONAL - len(optional))
    return insert_call(gm.graph, node, attend, (*operands, *absent, *scales), {**stored.kwargs, **options})
