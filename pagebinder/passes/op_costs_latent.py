"""Cost rules of the ops over latent rows: MLA, DeepSeek-V4's compressed attention, indexers, hyper-connections.

T tokens of a step, C context (`op_costs`), R tokens per entry, K entries that an indexer chooses:

    rows that a query attends to      window + min(K, entries visible)        entries visible: (C + T) / R
    rows that an indexer scores       all visible entries
"""

from __future__ import annotations

import sympy
from torch.fx import Node

from pagebinder.custom_ops.latent.layouts import row_bytes
from pagebinder.graph_tools import tensors
from pagebinder.passes.lock_facts import operand
from pagebinder.passes.op_costs import CONTEXT, ZERO, CostModel, OpCost
from pagebinder.passes.op_costs_ours import rows_read, visible_pairs

COMPRESS_FLOPS = 8  # per value: bias, two exponentials, maximum, two rescaled sums
SINKHORN_FLOPS = 4  # per value of a mixing matrix and round: two sums, two divisions


def _row_bytes(node: Node, cache, width: int) -> int:
    """Bytes of a row in a cache, or of a row of activations without one."""
    layout = operand(node, "layout") or "plain"
    if layout != "plain":
        return row_bytes(layout, width=int(width), rope_dim=operand(node, "rope_dim") or 0)
    return int(width) * tensors(cache)[0].dtype.itemsize


def _attended(tokens, window: int, ratio: int, topk: int | None, *, context=CONTEXT, has_entries=True):
    """(query, row) pairs of sparse attention, and the rows that are read at least once."""
    pairs = visible_pairs(tokens, context, window=window) if window else ZERO
    rows = rows_read(tokens, context, window=window) if window else ZERO
    if has_entries:
        visible = (context + tokens) / sympy.Integer(ratio)
        chosen = visible if topk is None else sympy.Min(visible, topk)
        # Each query chooses its own; what all choose together is at most everything.
        pairs, rows = pairs + tokens * chosen, rows + sympy.Min(visible, tokens * chosen)
    return pairs, rows


def _chosen(model: CostModel, indices) -> int | None:
    return None if indices is None else int(model.shape(indices)[1])


def _compressed_attention(model: CostModel, node: Node) -> OpCost:
    tokens, heads, width = model.shape(operand(node, "q"))
    pairs, _ = _attended(
        tokens, operand(node, "window"), operand(node, "ratio"), _chosen(model, operand(node, "indices")),
        context=ZERO, has_entries=operand(node, "entries") is not None,
    )  # fmt: skip
    return model.moved(node, flops=4 * heads * width * pairs)


def _sparse_mla(model: CostModel, node: Node) -> OpCost:
    q, indices, entries = (operand(node, name) for name in ("q", "indices", "entry_cache"))
    tokens, heads, width = model.shape(q)
    pairs, rows = _attended(
        tokens, operand(node, "window"), operand(node, "ratio"), _chosen(model, indices),
        has_entries=entries is not None,
    )  # fmt: skip
    cache = entries if entries is not None else operand(node, "window_cache")
    return OpCost(
        flops=2 * heads * (width + operand(node, "head_dim_v")) * pairs,
        activation_bytes=model.bytes_of(q) + model.bytes_of(indices) + model.out_bytes(node),
        cache_bytes=rows * _row_bytes(node, cache, width),
    )


def _indexed_pairs(model: CostModel, node: Node, context, q: str = "q"):
    """As `_attended`, for groups of `ratio` tokens and the tail behind them, half a group for most queries."""
    tokens, ratio = model.shape(operand(node, q))[0], operand(node, "ratio") or 1
    topk = _chosen(model, operand(node, "indices"))
    pairs, rows = _attended(tokens, 0, ratio, topk, context=context)
    tail = sympy.Rational(ratio - 1, 2)
    return ratio * pairs + tokens * tail, ratio * rows + tail


def _indexed_attention(model: CostModel, node: Node) -> OpCost:
    _, heads, width = model.shape(operand(node, "q"))
    pairs, _ = _indexed_pairs(model, node, ZERO)
    return model.moved(node, flops=2 * heads * (width + model.shape(operand(node, "v"))[2]) * pairs)


def _paged_indexed_attention(model: CostModel, node: Node) -> OpCost:
    q, cache, indices = (operand(node, name) for name in ("q", "kv_cache", "indices"))
    _, heads, width = model.shape(q)
    pairs, rows = _indexed_pairs(model, node, CONTEXT)
    _, kv_heads, _, row = model.shape(cache)
    return OpCost(
        flops=2 * heads * (width + operand(node, "head_dim_v")) * pairs,
        activation_bytes=model.bytes_of(q) + model.bytes_of(indices) + model.out_bytes(node),
        cache_bytes=rows * kv_heads * row * tensors(cache)[0].dtype.itemsize,
    )


def _index_topk(model: CostModel, node: Node) -> OpCost:
    tokens, heads, width = model.shape(operand(node, "q"))
    pairs = visible_pairs(tokens, ZERO) / operand(node, "ratio")
    return model.moved(node, flops=2 * heads * (width + 1) * pairs)


def _indexer(model: CostModel, node: Node) -> OpCost:
    q, cache = operand(node, "q"), operand(node, "k_cache")
    tokens, heads, width = model.shape(q)
    ratio = operand(node, "ratio")
    return OpCost(
        flops=2 * heads * (width + 1) * visible_pairs(tokens, CONTEXT) / ratio,
        activation_bytes=model.bytes_of(q) + model.bytes_of(operand(node, "weights")) + model.out_bytes(node),
        cache_bytes=(CONTEXT + tokens) / sympy.Integer(ratio) * _row_bytes(node, cache, width),
    )


def _mla(model: CostModel, node: Node) -> OpCost:
    """Expanded: the source's own arithmetic, keys and values made of every latent."""
    (tokens, heads, nope), (*_, rope) = (model.shape(operand(node, name)) for name in ("q_nope", "q_rope"))
    (_, value, latent) = model.shape(operand(node, "w_v"))
    made = 2 * tokens * heads * (nope + value) * latent
    pairs = visible_pairs(tokens, ZERO, window=operand(node, "window"))
    return model.moved(node, flops=made + 2 * heads * (nope + rope + value) * pairs)


def _paged_mla(model: CostModel, node: Node) -> OpCost:
    """Absorbed, as decodes are computed; long prefills cost less."""
    q_nope, q_rope, cache = (operand(node, name) for name in ("q_nope", "q_rope", "cache"))
    (tokens, heads, nope), (*_, rope) = model.shape(q_nope), model.shape(q_rope)
    (_, value, latent) = model.shape(operand(node, "w_v"))
    window = operand(node, "window")
    pairs, rows = visible_pairs(tokens, CONTEXT, window=window), rows_read(tokens, CONTEXT, window=window)
    if operand(node, "indices") is not None:
        pairs, rows = _indexed_pairs(model, node, CONTEXT, q="q_nope")
    absorbed = 2 * tokens * heads * (nope + value) * latent
    new = sum(model.bytes_of(x) for x in (q_nope, q_rope))
    return OpCost(
        flops=absorbed + 2 * heads * (2 * latent + rope) * pairs,
        weight_bytes=sum(model.bytes_of(operand(node, name)) for name in ("w_k", "w_v", "sinks")),
        activation_bytes=new + model.out_bytes(node),
        cache_bytes=rows * _row_bytes(node, cache, latent + rope),
    )


def _write(model: CostModel, node: Node) -> OpCost:
    name = "rows" if operand(node, "rows") is not None else "kv"
    rows, cache = operand(node, name), operand(node, "cache")
    tokens, width = model.shape(rows)[0], model.shape(rows)[-1]
    return OpCost(activation_bytes=model.bytes_of(rows), cache_bytes=tokens * _row_bytes(node, cache, width))


def _compress(model: CostModel, node: Node) -> OpCost:
    """The paged form also reads and writes a state, and writes an entry every `ratio` tokens."""
    kv, cache = operand(node, "kv"), operand(node, "entry_cache")
    flops = COMPRESS_FLOPS * model.numel(kv)
    if cache is None:
        return model.moved(node, flops=flops)
    state, width = operand(node, "state_cache"), model.shape(operand(node, "state_cache"))[-1]
    entries = model.shape(kv)[0] / sympy.Integer(operand(node, "ratio")) * _row_bytes(node, cache, width)
    return OpCost(
        flops=flops,
        weight_bytes=sum(model.bytes_of(operand(node, n)) for n in ("position_bias", "norm_weight")),
        activation_bytes=model.bytes_of(kv) + model.bytes_of(operand(node, "gate")),
        cache_bytes=2 * model.bytes_of(state) / model.shape(state)[0] + entries,
    )


def _hyper_connection(model: CostModel, node: Node) -> OpCost:
    streams, fn = operand(node, "streams"), operand(node, "fn")
    tokens, count = model.shape(streams)[:2]
    rounds = operand(node, "sinkhorn_iters") or 0
    mixing = tokens * count * count * SINKHORN_FLOPS * rounds
    return model.moved(node, flops=2 * tokens * model.numel(fn) + 4 * model.numel(streams) + mixing)


def _hyper_mix(model: CostModel, node: Node) -> OpCost:
    streams = operand(node, "streams")
    return model.moved(node, flops=2 * (model.shape(streams)[1] + 1) * model.numel(streams))


def _q_norm_rope(model: CostModel, node: Node) -> OpCost:
    return model.moved(node, flops=6 * model.numel(operand(node, "q")))


def _inverse_rope_grouped_linear(model: CostModel, node: Node) -> OpCost:
    x, weight = operand(node, "x"), operand(node, "weight")
    products = 2 * model.shape(x)[0] * model.numel(weight)
    return model.moved(node, flops=products + 3 * model.numel(x))


RULES = {
    "compressed_attention": _compressed_attention,
    "sparse_mla_attention": _sparse_mla,
    "indexed_attention": _indexed_attention,
    "paged_indexed_attention": _paged_indexed_attention,
    "index_topk": _index_topk,
    "indexer_score_topk": _indexer,
    "mla_attention": _mla,
    "paged_mla_attention": _paged_mla,
    "latent_cache_write": _write,
    "kv_rope_quant_store": _write,
    "compress": _compress,
    "compress_norm_rope_store": _compress,
    "hyper_connection": _hyper_connection,
    "hyper_head": _hyper_connection,
    "hyper_mix": _hyper_mix,
    "q_norm_rope": _q_norm_rope,
    "inverse_rope_grouped_linear": _inverse_rope_grouped_linear,
}
