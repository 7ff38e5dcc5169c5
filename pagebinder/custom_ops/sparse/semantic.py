"""`pagebinder::index_topk` and `compressed_attention`: sparse attention to compressed entries, over one sequence.

    tokens    0 1 2 3 | 4 5 6 7 | 8 9 ...          ratio = 4
    entries         0 |       1 |                  entry w lies in row (w+1) * ratio - 1, so every row is a token's
    a query at p sees entries w < (p+1) // ratio   (the one that p itself completes, too)

T tokens, H query heads, D width of a row, Hi index heads, d their width, K top-k, N rows that a query may attend to.

Source: DeepSeek-V3.2-Exp (the lightning indexer) and DeepSeek-V4 (compressed entries, one softmax with a sink).
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.custom_ops.latent.layouts import require
from pagebinder.custom_ops.library import define_op

QUERIES_AT_ONCE = 128  # of the references: bounds their [queries, heads, rows] scores


def num_visible(p, ratio: int):
    """Entries that a query at position p sees: those whose last token is at or before p."""
    return (p + 1) // ratio


def aligned_entries(rows_TD: torch.Tensor, ratio: int) -> torch.Tensor:
    """Entries [T // ratio, D] from token-aligned rows: entry w is row (w+1) * ratio - 1."""
    return rows_TD[ratio - 1 :: ratio]


# ---- index scores and their top-k ------------------------------------------------------------------------------


def index_scores(q_THd, k_Nd, weights_TH, scale: float) -> torch.Tensor:
    """[T, N] float32: sum over heads of weight * relu(scale * q.k)."""
    scores = [
        (torch.relu(torch.einsum("thd,nd->thn", q, k_Nd.float()) * scale) * weights[:, :, None]).sum(1)
        for q, weights in zip(q_THd.float().split(QUERIES_AT_ONCE), weights_TH.float().split(QUERIES_AT_ONCE))
    ]
    return torch.cat(scores) if scores else q_THd.new_empty((0, len(k_Nd)), dtype=torch.float32)


def select_topk(scores_TN, num_visible_T, topk: int) -> torch.Tensor:
    """[T, topk] int32: of the first `num_visible_T[t]` scores the topk largest, as ascending indices, then -1.

    Equal scores go to the lowest index; a NaN counts as -inf.
    """
    num_tokens, num_entries = scores_TN.shape
    visible = torch.arange(num_entries, device=scores_TN.device) < num_visible_T[:, None]
    ranked = scores_TN.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    ranked = ranked.masked_fill(~visible, float("-inf"))
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    best = best.masked_fill(best >= num_visible_T[:, None], num_entries).sort(dim=-1).values
    chosen = torch.full((num_tokens, topk), -1, dtype=torch.int32, device=scores_TN.device)
    chosen[:, : best.shape[1]] = best.masked_fill(best == num_entries, -1).int()
    return chosen


def index_topk_reference(q_THd, k_Td, weights_TH, *, topk: int, ratio: int, scale: float):
    """The entries that an indexer selects for every query of one sequence.

    Args:
        q_THd: index queries [T, Hi, d]. weights_TH: [T, Hi], whatever factor belongs to all heads included.
        k_Td: index keys [T, d], token-aligned (see the picture above); ratio 1 has one key a token.
        topk: how many at most. scale: of q.k before the ReLU.
    Returns:
        [T, topk] int32: the visible entries with the largest scores, ties to the lowest index, in ascending order;
        all visible ones if there are no more than topk. -1 behind them.
    Raises:
        ValueError: shapes do not fit, or topk or ratio is not positive.
    """
    require(q_THd.dim() == 3 and k_Td.dim() == 2, "q is [T, Hi, d] and k is [T, d]")
    require(q_THd.shape[0] == k_Td.shape[0] and q_THd.shape[2] == k_Td.shape[1], "q and k do not fit")
    require(weights_TH.shape == q_THd.shape[:2], "weights must be [T, Hi]")
    require(topk > 0 and ratio > 0, "topk and ratio must be positive")
    p = torch.arange(len(q_THd), device=q_THd.device)
    scores = index_scores(q_THd, aligned_entries(k_Td, ratio), weights_TH, scale)
    return select_topk(scores, num_visible(p, ratio), topk)


# ---- attention -------------------------------------------------------------------------------------------------


def listed_entries(indices_TK, num_entries: int) -> torch.Tensor:
    """[T, N] bool: is entry w in row t of indices? Entries < 0 or >= N are no entries."""
    listed = torch.zeros((len(indices_TK), num_entries + 1), dtype=torch.bool, device=indices_TK.device)
    indices = indices_TK.long()
    indices = indices.masked_fill((indices < 0) | (indices >= num_entries), num_entries)
    return listed.scatter_(1, indices, True)[:, :num_entries]


def visible_entries(p_T, num_entries: int, ratio: int, indices_TK=None) -> torch.Tensor:
    """[T, N] bool: does the query at p attend to entry w? It is complete, and listed if there is a list."""
    w = torch.arange(num_entries, device=p_T.device)
    visible = w < num_visible(p_T, ratio)[:, None]
    return visible if indices_TK is None else visible & listed_entries(indices_TK, num_entries)


def attend_to_rows(q_THD, rows_ND, visible_TN, sinks, scale: float, head_dim_v: int) -> torch.Tensor:
    """One softmax over the visible rows, which all heads share; V is the leading part of a row.

    Returns [T, H, head_dim_v] float32. A query that sees nothing gets zeros.
    """
    rows = rows_ND.float()
    outs = [q_THD.new_zeros((0, q_THD.shape[1], head_dim_v), dtype=torch.float32)]
    for q, visible in zip(q_THD.float().split(QUERIES_AT_ONCE), visible_TN.split(QUERIES_AT_ONCE)):
        scores = torch.einsum("thd,nd->thn", q, rows) * scale
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        total = torch.logsumexp(scores, dim=-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.expand_as(total))
        weights = torch.exp(scores - total.masked_fill(total == float("-inf"), 0.0)[..., None])
        outs.append(torch.einsum("thn,nd->thd", weights, rows[:, :head_dim_v]))
    return torch.cat(outs)


def compressed_attention_reference(
    q_THD, kv_TD, entries_TD, indices_TK, sinks, *, scale: float, window: int, ratio: int
):
    """Attention of one sequence to the last `window` tokens and to compressed entries, in one softmax.

    Args:
        q_THD: queries [T, H, D]. kv_TD: [T, D], at once key and value of a token, for all heads.
        entries_TD: token-aligned entries [T, D] (see the picture above), key and value as well; None = no entries.
        indices_TK: [T, K] int32, the entries that a query attends to (each once; -1 is unused, and one that the
            query does not see is left out); None = all it sees.
        sinks: [H] float32 logit that joins the softmax without a value.
        window: key j is seen iff p - window < j <= p; 0 = no tokens.
    Returns:
        [T, H, D] in q's dtype, computed in float32. A query that sees nothing gets zeros.
    Raises:
        ValueError: shapes do not fit, or indices without entries.
    """
    _check_compressed_attention(q_THD, kv_TD, entries_TD, indices_TK, sinks, window, ratio)
    p = torch.arange(len(q_THD), device=q_THD.device)
    rows, visible = kv_TD, visible_keys(p[:, None], p[None], window=window)
    if entries_TD is not None:
        entries = aligned_entries(entries_TD, ratio)
        rows = torch.cat([rows, entries.to(rows.dtype)])
        visible = torch.cat([visible, visible_entries(p, len(entries), ratio, indices_TK)], dim=1)
    return attend_to_rows(q_THD, rows, visible, sinks, scale, kv_TD.shape[1]).to(q_THD.dtype)


def _check_compressed_attention(q, kv, entries, indices, sinks, window, ratio) -> None:
    require(q.dim() == 3 and kv.shape == (q.shape[0], q.shape[2]), "q is [T, H, D] and kv is [T, D]")
    require(entries is None or entries.shape == kv.shape, "entries must be token-aligned: [T, D] as kv")
    require(indices is None or entries is not None, "indices without entries")
    fits = indices is None or (indices.dim() == 2 and len(indices) == len(q) and indices.dtype == torch.int32)
    require(fits, "indices must be int32 [T, K]")
    require(
        sinks is None or (sinks.shape == q.shape[1:2] and sinks.dtype == torch.float32),
        "sinks must be float32 [H]",
    )
    require(window >= 0 and ratio > 0, "window must not be negative, ratio must be positive")


# ---- registration ----------------------------------------------------------------------------------------------


def _index_topk_fake(q, k, weights, *, topk, ratio, scale):
    torch._check(q.dim() == 3 and k.dim() == 2, lambda: "q is [T, Hi, d] and k is [T, d]")
    torch._check(q.shape[2] == k.shape[1], lambda: "q and k must have the same width")
    torch._check(topk > 0 and ratio > 0, lambda: "topk and ratio of an indexer must be positive")
    return q.new_empty((q.shape[0], topk), dtype=torch.int32)


def _compressed_attention_fake(q, kv, entries, indices, sinks, *, scale, window, ratio):
    torch._check(q.dim() == 3 and kv.dim() == 2, lambda: "q is [T, H, D] and kv is [T, D]")
    torch._check(q.shape[2] == kv.shape[1], lambda: "q and kv must have the same width")
    return q.new_empty(q.shape)


INDEX_TOPK = define_op(
    "index_topk",
    "(Tensor q, Tensor k, Tensor weights, *, int topk, int ratio, float scale) -> Tensor",
    reference=index_topk_reference,
    fake=_index_topk_fake,
)

COMPRESSED_ATTENTION = define_op(
    "compressed_attention",
    "(Tensor q, Tensor kv, Tensor? entries, Tensor? indices, Tensor? sinks, *, float scale, int window, int ratio)"
    " -> Tensor",
    reference=compressed_attention_reference,
    fake=_compressed_attention_fake,
)
