"""DeepSeek-V4's compressed attention over one sequence -> the same over requests, with all its caches paged.

Matches:
    entries = compress(kv [T, c*D], gate, position_bias, norm_weight, inv_freq)
    indices = index_topk(q [T, Hi, d], keys: entries of the indexer's own compressor, weights [T, Hi])
    out = compressed_attention(q [T, H, D], kv [T, D], entries?, indices?, sinks)
Replaces with:
    compress_norm_rope_store(..., sums cache, its table, entries cache, its table)
    indices = indexer_score_topk(q, weights, keys cache, its table)
    latent_cache_write(kv, window cache, slots)
    out = sparse_mla_attention(q, window cache, its table, entries cache?, its table, indices?, sinks)

    token        window rows      compressor's sums      entries           index keys
      p   ──kv──▶ [.....p]   ──▶   [m, l, sum]   ──▶   [0 1 2 .. p/R]   [0 1 2 .. p/R]
                  freed behind      one state             grow by one row every R tokens
                  the window        per request

An entry never leaves its cache: who read the compressor's result reads the cache.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.layer_state import LatentState
from pagebinder.graph_tools import arg, calls, describe, finish, insert_call, is_call
from pagebinder.passes.latent_states import COMPRESS, COMPRESSED_ATTENTION, INDEX_TOPK
from pagebinder.passes.layer_states import (
    Paging,
    add_block_table,
    add_caches,
    add_request_lengths,
    add_slots,
    where_kept,
)
from pagebinder.report import Match, PassResult

# Of a compressor's states, in the order of `latent_states.compressor_states`.
SUMS, ENTRIES = 0, 1


def page_compressed(gm: GraphModule, *, paging: Paging) -> PassResult:
    """Rewrite compressors, the indexers that read them and compressed attention."""
    result = PassResult(name="page_compressed")
    for node in calls(gm.graph, COMPRESS, INDEX_TOPK, COMPRESSED_ATTENTION):
        if is_call(node, INDEX_TOPK) and not is_call(node.args[1], COMPRESS):
            continue  # keys of single tokens: page_mla's
        result.matches.append(
            Match(pattern=PAGED[node.target], detail=where_kept(paging, node), **describe(node))
        )
        REWRITES[node.target](gm, node, paging)
    for node in reversed(list(calls(gm.graph, COMPRESS))):  # their readers have gone before them
        gm.graph.erase_node(node)
    result.changed = bool(result.matches)
    result.changes_numbers = result.rounds_values = result.changed and paging.rounds_latents
    finish(gm)
    return result


def _page_compress(gm: GraphModule, node: Node, paging: Paging) -> None:
    (sums,), (_, sums_group, sums_block) = add_caches(gm, paging, node, SUMS), paging.of(node, SUMS)
    entries, table, stored = _entries(gm, node, paging)
    lens, starts = add_request_lengths(gm)
    caches = (sums, add_block_table(gm, sums_group), entries, table)
    options = {"rope_scale": 1.0, **node.kwargs, "block_size": sums_block, **stored}
    store = torch.ops.pagebinder.compress_norm_rope_store.default
    insert_call(gm.graph, node, store, (*node.args, *caches, lens, starts), options)


def _page_index(gm: GraphModule, node: Node, paging: Paging) -> None:
    q, keys, weights = node.args
    cache, table, stored = _entries(gm, keys, paging)
    lens, starts = add_request_lengths(gm)
    options = {**node.kwargs, "layout": stored["layout"]}
    score = torch.ops.pagebinder.indexer_score_topk.default
    _replace(gm, node, score, (q, weights, cache, table, lens, starts), options)


def _page_attention(gm: GraphModule, node: Node, paging: Paging) -> None:
    q, kv = node.args[:2]
    compressor, indices = arg(node, 2, "entries"), arg(node, 3, "indices")
    sinks = arg(node, 4, "sinks")
    state, group, _ = paging.of(node)
    (window,), stored = add_caches(gm, paging, node), _stored(state)
    write = torch.ops.pagebinder.latent_cache_write.default
    insert_call(gm.graph, node, write, (kv, window, add_slots(gm, group)), stored)
    entries, table = (None, None) if compressor is None else _entries(gm, compressor, paging)[:2]
    lens, starts = add_request_lengths(gm)
    args = (q, window, add_block_table(gm, group), entries, table, indices, lens, starts, sinks)
    options = {**node.kwargs, "head_dim_v": state.latent_dim, **stored}
    _replace(gm, node, torch.ops.pagebinder.sparse_mla_attention.default, args, options)


def _entries(gm: GraphModule, compressor: Node, paging: Paging) -> tuple[Node, Node, dict]:
    """(cache, block table, how rows are stored) of a compressor's entries."""
    state, group, _ = paging.of(compressor, ENTRIES)
    (cache,) = add_caches(gm, paging, compressor, ENTRIES)
    return cache, add_block_table(gm, group), _stored(state)


def _stored(state: LatentState) -> dict:
    return {"layout": state.layout, "rope_dim": state.rope_dim}


def _replace(gm: GraphModule, node: Node, op: torch._ops.OpOverload, args: tuple, options: dict) -> None:
    node.replace_all_uses_with(insert_call(gm.graph, node, op, args, options))
    gm.graph.erase_node(node)


REWRITES = {COMPRESS: _page_compress, INDEX_TOPK: _page_index, COMPRESSED_ATTENTION: _page_attention}
PAGED = {
    COMPRESS: "compress_norm_rope_store",
    INDEX_TOPK: "indexer_score_topk",
    COMPRESSED_ATTENTION: "sparse_mla_attention",
}
