"""Latent attention without a cache -> write of the latent rows + paged latent attention, and the same for indexers.

Matches:
    out = mla_attention(q_nope [T, H, N], q_rope, latent [T, L], k_rope [T, P], w_k, w_v, indices?, sinks?)
Replaces with:
    latent_cache_write(cat(latent, k_rope), kv_cache_i, slot_mapping_g)
    out = paged_mla_attention(q_nope, q_rope, w_k, w_v, kv_cache_i, block_table_g, seq_lens, query_start_loc, indices,
                              sinks)

Matches:
    indices = index_topk(q [T, Hi, d], k [T, d], weights [T, Hi], topk, ratio=1)         keys of single tokens
Replaces with:
    latent_cache_write(k, kv_cache_i, slot_mapping_g)
    indices = indexer_score_topk(q, weights, kv_cache_i, block_table_g, seq_lens, query_start_loc, topk, ratio=1)

Both caches have a row per token. What an index means (a position in its request) is the same in both, whatever their
groups and block sizes. Indexers over compressed entries are page_compressed's.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.graph_tools import arg, aten, calls, describe, finish, insert_call, is_call, val
from pagebinder.passes.latent_states import COMPRESS, INDEX_TOPK
from pagebinder.passes.layer_states import (
    Paging,
    add_block_table,
    add_caches,
    add_request_lengths,
    add_slots,
    where_kept,
)
from pagebinder.report import Match, PassResult

MLA = torch.ops.pagebinder.mla_attention.default
PATTERNS = {MLA: "paged_mla_attention", INDEX_TOPK: "indexer_score_topk"}


def page_mla(gm: GraphModule, *, paging: Paging) -> PassResult:
    """Rewrite every latent attention, and every indexer over keys of single tokens."""
    result = PassResult(name="page_mla")
    for node in calls(gm.graph, *PATTERNS):
        if is_call(node, INDEX_TOPK) and is_call(node.args[1], COMPRESS):
            continue
        match = Match(pattern=PATTERNS[node.target], detail=where_kept(paging, node), **describe(node))
        result.matches.append(match)
        rewrite = _page_attention if is_call(node, MLA) else _page_index
        node.replace_all_uses_with(rewrite(gm, node, paging))
        gm.graph.erase_node(node)
    result.changed = bool(result.matches)
    result.changes_numbers = result.rounds_values = result.changed and paging.rounds_latents
    finish(gm)
    return result


def _page_attention(gm: GraphModule, node: Node, paging: Paging) -> Node:
    q_nope, q_rope, latent, k_rope, w_k, w_v = node.args[:6]
    rows = insert_call(gm.graph, node, aten.cat.default, ([latent, k_rope], -1))
    cache, table, layout = _write(gm, node, rows, paging, rope_dim=int(val(k_rope).shape[-1]))
    optional = [arg(node, 6, "indices"), arg(node, 7, "sinks")]
    args = (q_nope, q_rope, w_k, w_v, cache, table, *add_request_lengths(gm), *optional)
    options = {**node.kwargs, "layout": layout}
    for name in ("indices", "sinks"):
        options.pop(name, None)
    return insert_call(gm.graph, node, torch.ops.pagebinder.paged_mla_attention.default, args, options)


def _page_index(gm: GraphModule, node: Node, paging: Paging) -> Node:
    q, k, weights = node.args
    cache, table, layout = _write(gm, node, k, paging)
    args = (q, weights, cache, table, *add_request_lengths(gm))
    options = {**node.kwargs, "layout": layout}
    return insert_call(gm.graph, node, torch.ops.pagebinder.indexer_score_topk.default, args, options)


def _write(
    gm: GraphModule, node: Node, rows: Node, paging: Paging, rope_dim: int = 0
) -> tuple[Node, Node, str]:
    """Write an op's rows before it: (cache, block table, layout)."""
    state, group, _ = paging.of(node)
    (cache,) = add_caches(gm, paging, node)
    stored = {"layout": state.layout, "rope_dim": 0 if state.layout == "plain" else rope_dim}
    write = torch.ops.pagebinder.latent_cache_write.default
    insert_call(gm.graph, node, write, (rows, cache, add_slots(gm, group)), stored)
    return cache, add_block_table(gm, group), state.layout
