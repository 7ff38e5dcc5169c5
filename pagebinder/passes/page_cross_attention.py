"""Cross attention without a cache -> write of the encoder's K and V + paged attention over them.

Matches:
    out = cross_attention(q [T, H, D], k [E, G, D], v [E, G, Dv], scale, soft_cap)
Replaces with:
    kv_cache_write(k, v, kv_cache_i, slot_mapping_g)                            slot_mapping_g [E]
    out = paged_attention(q, kv_cache_i, block_table_g, encoder_lens, query_start_loc, soft_cap, causal=False)

The E rows of a step are the encoder tokens of the requests whose encoder ran for it, one request after another;
every later step of such a request only reads. A step that writes nothing has one row with slot -1.

    encoder_states [E, C]    a0 a1 a2 | c0 c1          requests a and c are new, b is not
    slot_mapping_g [E]       16 17 18 | 48 49          a in block 1, c in block 3 (B = 16)
    encoder_lens   [R]       a: 3   b: 20   c: 2       b reads blocks 5 and 6, written in an earlier step

Without causality, window and chunk, a query sees every key below its request's length, wherever the query is.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import insert_call
from pagebinder.passes.layer_states import (
    Paging,
    add_block_table,
    add_caches,
    add_request_lengths,
    rewrite_stateful,
)
from pagebinder.passes.step_inputs import add_step_input
from pagebinder.report import PassResult

PATTERNS = {torch.ops.pagebinder.cross_attention.default: "paged_cross_attention"}
ENCODER_LENS = "encoder_lens"


def page_cross_attention(gm: GraphModule, *, paging: Paging) -> PassResult:
    """Rewrite every cross attention op."""
    return rewrite_stateful(gm, paging, "page_cross_attention", PATTERNS, _paged_form)


def _paged_form(gm: GraphModule, node: Node, paging: Paging) -> Node:
    state, group, _ = paging.of(node)
    q, k, v = node.args
    (cache,) = add_caches(gm, paging, node)
    slots = add_step_input(gm, f"slot_mapping_{group}", ("num_encoder_tokens",), torch.int32)
    table = add_block_table(gm, group)
    _, starts = add_request_lengths(gm)
    encoder_lens = add_step_input(gm, ENCODER_LENS, ("num_reqs",), torch.int32)
    insert_call(gm.graph, node, torch.ops.pagebinder.kv_cache_write.default, (k, v, cache, slots))
    return insert_call(
        gm.graph,
        node,
        torch.ops.pagebinder.paged_attention.default,
        (q, cache, table, encoder_lens, starts),
        {"head_dim_v": state.head_dim_v, "causal": False, **node.kwargs},
    )
