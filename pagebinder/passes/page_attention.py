"""Attention without a cache -> cache write + paged attention over the layer's pages.

Matches:
    out = attention(q [T, H, D], k [T, G, D], v [T, G, Dv], sinks, slopes, scale, window, chunk, soft_cap, causal)
Replaces with:
    kv_cache_write(k, v, kv_cache_i, slot_mapping_g)
    out = paged_attention(q, kv_cache_i, block_table_g, seq_lens, query_start_loc, sinks, slopes, ...)

i is the layer's number, g its KV group: layers of a group share one block table and one slot mapping.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.layer_state import DTYPE_BYTES, AttentionState
from pagebinder.graph_tools import calls, describe, finish, insert_call, module_path, val
from pagebinder.passes.step_inputs import add_step_input
from pagebinder.report import Match, PassResult

PATTERN = "paged_attention"


def cache_name(index: int) -> str:
    return f"kv_cache_{index}"


def attention_states(gm: GraphModule, *, max_model_len: int) -> list[AttentionState]:
    """The state of every attention op, in execution order. A window that no request can leave is full attention."""
    states = []
    for index, node in enumerate(calls(gm.graph, torch.ops.pagebinder.attention.default)):
        k, v = val(node.args[1]), val(node.args[2])
        window = node.kwargs.get("window")
        states.append(
            AttentionState(
                layer=module_path(node) or f"attention_{index}",
                index=index,
                dtype=str(k.dtype).removeprefix("torch."),
                num_kv_heads=int(k.shape[1]),
                head_dim=int(k.shape[2]),
                head_dim_v=int(v.shape[2]),
                window=window if window is not None and window < max_model_len else None,
            )
        )
    return states


def page_attention(
    gm: GraphModule,
    *,
    states: list[AttentionState],
    group_of: dict[int, int],
    block_sizes: list[int],
    bytes_per_block: int,
) -> PassResult:
    """Rewrite every attention op.

    Args:
        states: as `attention_states` gave them. group_of: layer number -> KV group.
        block_sizes: tokens per block of each group.
        bytes_per_block: distance of a layer's page in one block from its page in the next.
    """
    result = PassResult(name="page_attention")
    for state, node in zip(states, calls(gm.graph, torch.ops.pagebinder.attention.default), strict=True):
        group = group_of[state.index]
        cache = _add_cache(gm, state, block_sizes[group], bytes_per_block)
        _rewrite(gm, node, state, group, cache)
        detail = f"{state.kind}, KV group {group}, block size {block_sizes[group]}"
        result.matches.append(Match(pattern=PATTERN, detail=detail, **describe(node)))
    result.changed = bool(result.matches)
    finish(gm)
    return result


def _add_cache(gm: GraphModule, state: AttentionState, block_size: int, bytes_per_block: int) -> Node:
    """The layer's view of the arena: [N, G, B, D + Dv], dense inside a page, one block stride apart."""
    width = state.head_dim + state.head_dim_v
    stride = bytes_per_block // DTYPE_BYTES[state.dtype]
    return add_step_input(
        gm,
        cache_name(state.index),
        ("num_blocks", state.num_kv_heads, block_size, width),
        getattr(torch, state.dtype),
        (stride, block_size * width, width, 1),
    )


def _rewrite(gm: GraphModule, node: Node, state: AttentionState, group: int, cache: Node) -> None:
    q, k, v, *optional = node.args
    slots = add_step_input(gm, f"slot_mapping_{group}", ("num_tokens",), torch.int32)
    table = add_step_input(gm, f"block_table_{group}", ("num_reqs", f"table_width_{group}"), torch.int32)
    lens = add_step_input(gm, "seq_lens", ("num_reqs",), torch.int32)
    starts = add_step_input(gm, "query_start_loc", ("num_reqs_plus_1",), torch.int32)
    insert_call(gm.graph, node, torch.ops.pagebinder.kv_cache_write.default, (k, v, cache, slots))
    paged = insert_call(
        gm.graph,
        node,
        torch.ops.pagebinder.paged_attention.default,
        (q, cache, table, lens, starts, *optional),
        {"head_dim_v": state.head_dim_v, **node.kwargs},
    )
    node.replace_all_uses_with(paged)
    gm.graph.erase_node(node)
