"""`pagebinder::indexer_score_topk`: which entries of a paged index cache a query attends to.

    k_cache  rows of entries, d wide         score(p, w) = sum over h of weights[h] * relu(scale * q[h] . k[w])
    +---------------------------+
    | block: n rows             | w -> block w // n of k_table, row w % n      w < (p+1) // ratio
    +---------------------------+

    [T, topk]    3  8  9 21 -1 -1 ...    the largest scores, ascending, numbered within the request

Quantised keys meet queries that are quantised by the same rule, so that products are exact in bfloat16.

T tokens, R requests, Hi index heads, d their width, M blocks per request at most.

Source: DeepSeek-V3.2-Exp (the lightning indexer; ratio 1) and DeepSeek-V4 (over compressed entries).
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.latent.layouts import dequantise_rows, quantise_rows, require, row_layout
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.sparse.semantic import index_scores, num_visible, select_topk
from pagebinder.custom_ops.sparse.sparse_mla import (
    check_cache,
    check_lengths,
    check_table,
    gather_rows,
    requests_of,
)

LAYOUTS = ("plain", "fp8_index", "fp4_index")


def indexer_score_topk_reference(
    q_THd,
    weights_TH,
    k_cache,
    k_table,
    seq_lens_R,
    query_start_loc,
    *,
    topk: int,
    ratio: int,
    scale: float,
    layout: str = "plain",
):
    """`index_topk` of a mixed batch over a paged cache.

    Args:
        q_THd: index queries [T, Hi, d], last stride 1. weights_TH: [T, Hi] of q's dtype or float32.
        k_cache: index keys of layout "plain" (of q's dtype), "fp8_index" or "fp4_index"; k_table [R or more, M]
            int32. The cache holds the keys of the new tokens already.
        seq_lens_R: [R] int32 with the new tokens. query_start_loc: [R+1] int32; tokens behind it are padding.
        topk: how many at most. ratio: tokens per entry. scale: of q.k before the ReLU.
    Returns:
        [T, topk] int32: numbers of the request's entries with the largest scores, ties to the lowest, in ascending
        order, then -1; all -1 for padding. A score that is NaN counts as -inf.
    Raises:
        ValueError: shapes or dtypes do not fit, a length exceeds the table, or a block id is not valid.
    """
    check_operands(q_THd, weights_TH, k_cache, k_table, seq_lens_R, query_start_loc, topk, ratio)
    require(layout in LAYOUTS, f"layout {layout} is not one of {', '.join(LAYOUTS)}")
    num_tokens, _, width = q_THd.shape
    chosen = torch.full((num_tokens, topk), -1, dtype=torch.int32, device=q_THd.device)
    q = requantised(q_THd, layout)
    for r, mine, p in requests_of(seq_lens_R, query_start_loc, num_tokens):
        w = torch.arange(max(0, num_visible(int(p[-1]), ratio)), device=q.device)
        k = gather_rows(k_cache, k_table[r], w, layout, 0, width)
        scores = index_scores(q[mine], k, weights_TH[mine], scale)
        chosen[mine] = select_topk(scores, num_visible(p, ratio), topk)
    return chosen


def requantised(q_THd: torch.Tensor, layout: str) -> torch.Tensor:
    """What queries are once they have been quantised like the keys they meet; float32."""
    if layout == "plain":
        return q_THd.float()
    spec = row_layout(layout, q_THd.shape[-1], 0)
    return dequantise_rows(*quantise_rows(q_THd, spec), spec)


def check_operands(q, weights, k_cache, k_table, seq_lens, starts, topk, ratio) -> None:
    require(q.dim() == 3 and (q.shape[2] == 1 or q.stride(2) == 1), "q is [T, Hi, d], its last stride 1")
    require(weights.shape == q.shape[:2], "weights must be [T, Hi]")
    require(weights.dtype in (torch.float32, q.dtype), "weights must be float32 or of q's dtype")
    require(topk > 0 and ratio > 0, "topk and ratio must be positive")
    check_cache(q, k_cache, "k_cache")
    check_table(k_table, seq_lens, "k_table")
    check_lengths(seq_lens, starts)


def _fake(q, weights, *operands, topk, **_):
    torch._check(q.dim() == 3 and weights.dim() == 2, lambda: "q is [T, Hi, d] and weights are [T, Hi]")
    return q.new_empty((q.shape[0], topk), dtype=torch.int32)


INDEXER_SCORE_TOPK = define_op(
    "indexer_score_topk",
    "(Tensor q, Tensor weights, Tensor k_cache, Tensor k_table, Tensor seq_lens, Tensor query_start_loc, *, "
    'int topk, int ratio, float scale, str layout="plain") -> Tensor',
    reference=indexer_score_topk_reference,
    fake=_fake,
)
