"""`pagebinder::indexed_attention` and `paged_indexed_attention`: attention to chosen groups of keys (Qwen4's QSA).

    ratio = 4    keys      0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13          a query at p = 13
                 entry        0         1         2      |  tail          sees entries w < (p + 1) // ratio that
                              x                   x         x  x          its indices list, and the tail, always

What an index means is what `index_topk` says with the same ratio. With ratio 1 there is no tail.

T tokens, R requests, H query heads, G KV heads, D width of q and k, Dv of v, K listed entries a query, N blocks, B
block size, M blocks per request at most. Cache and metadata are those of `paged.py`.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.paged import check_attention
from pagebinder.custom_ops.latent.layouts import require
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.sparse.semantic import QUERIES_AT_ONCE, num_visible, visible_entries
from pagebinder.custom_ops.sparse.sparse_mla import requests_of


def indexed_attention_reference(q_THD, k_TGD, v_TGD, indices_TK, *, scale: float, ratio: int):
    """Causal attention of one sequence to chosen entries and the tail, computed in float32.

    Args:
        q_THD: queries [T, H, D]. k_TGD: keys [T, G, D]. v_TGD: values [T, G, Dv]; H is a multiple of G.
        indices_TK: [T, K] int32, the entries that a query attends to (each once; -1 is unused, and one that the
            query does not see is left out).
        scale: of the scores. ratio: tokens of an entry.
    Returns:
        [T, H, Dv] in q's dtype. A query that sees nothing gets zeros.
    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_indices(q_THD, indices_TK, ratio)
    require(q_THD.dim() == k_TGD.dim() == v_TGD.dim() == 3, "q, k and v are [tokens, heads, width]")
    require(k_TGD.shape[:2] == v_TGD.shape[:2], "k and v must agree in tokens and KV heads")
    require(q_THD.shape[0] == k_TGD.shape[0] and q_THD.shape[2] == k_TGD.shape[2], "q and k do not fit")
    require(q_THD.shape[1] % k_TGD.shape[1] == 0, "query heads must be a multiple of KV heads")
    p = torch.arange(len(q_THD), device=q_THD.device)
    return _attend(q_THD, k_TGD, v_TGD, visible_tokens(p, len(k_TGD), indices_TK, ratio), scale)


def paged_indexed_attention_reference(
    q_THD, kv_cache_NGBE, block_table_RM, seq_lens_R, query_start_loc, indices_TK, *, head_dim_v: int, scale: float,
    ratio: int,
):  # fmt: skip
    """The same of a mixed batch over a paged cache that holds the new tokens' K and V.

    Args:
        kv_cache_NGBE ... query_start_loc: as in `paged_attention`. indices_TK: entries within each query's request.
    Returns:
        [T, H, Dv] in q's dtype, zeros for padding and for a query that sees nothing.
    Raises:
        ValueError: shapes or dtypes do not fit, a length exceeds the block table, or a block id is not valid.
    """
    check_paged(
        q_THD, kv_cache_NGBE, block_table_RM, seq_lens_R, query_start_loc, indices_TK, head_dim_v, ratio
    )
    (num_tokens, num_heads, head_dim), block_size = q_THD.shape, kv_cache_NGBE.shape[2]
    out = q_THD.new_zeros((num_tokens, num_heads, head_dim_v))
    for r, mine, p in requests_of(seq_lens_R, query_start_loc, num_tokens):
        seq_len = int(p[-1]) + 1
        require(seq_len <= block_table_RM.shape[1] * block_size, "a seq_len exceeds its block table")
        visible = visible_tokens(p, seq_len, indices_TK[mine], ratio)
        j = visible.any(0).nonzero().flatten()  # blocks of others are not read
        blocks = block_table_RM[r].long()[j // block_size]
        require(bool(((blocks >= 0) & (blocks < len(kv_cache_NGBE))).all()), "a block id is not valid")
        kv = kv_cache_NGBE[blocks, :, j % block_size]
        out[mine] = _attend(q_THD[mine], kv[..., :head_dim], kv[..., head_dim:], visible[:, j], scale)
    return out


def visible_tokens(p_T, num_keys: int, indices_TK, ratio: int) -> torch.Tensor:
    """[T, S] bool: does the query at p see the key of position j?"""
    j = torch.arange(num_keys, device=p_T.device)
    entries = -(-num_keys // ratio)
    listed = visible_entries(p_T, entries, ratio, indices_TK).repeat_interleave(ratio, dim=1)[:, :num_keys]
    tail = j >= num_visible(p_T, ratio)[:, None] * ratio
    return (listed | tail) & (j <= p_T[:, None])


def _attend(q_THD, k_SGD, v_SGD, visible_TS, scale: float) -> torch.Tensor:
    group = q_THD.shape[1] // k_SGD.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k_SGD, v_SGD))
    outs = [q_THD.new_zeros((0, q_THD.shape[1], v_SGD.shape[2]), dtype=torch.float32)]
    for q, visible in zip(q_THD.float().split(QUERIES_AT_ONCE), visible_TS.split(QUERIES_AT_ONCE)):
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1).nan_to_num(0.0)
        outs.append(torch.einsum("hts,shd->thd", weights, v))
    return torch.cat(outs).to(q_THD.dtype)


def check_indices(q, indices, ratio: int) -> None:
    """Raises ValueError."""
    require(ratio > 0, "ratio must be positive")
    fits = indices.dim() == 2 and len(indices) == len(q) and indices.dtype == torch.int32
    require(fits, "indices must be int32 [T, K]")


def check_paged(q, kv_cache, table, seq_lens, starts, indices, head_dim_v: int, ratio: int) -> None:
    """Raises ValueError."""
    check_attention(q, kv_cache, table, seq_lens, starts, None, None, head_dim_v)
    check_indices(q, indices, ratio)


def _indexed_attention_fake(q, k, v, indices, *, scale, ratio):
    torch._check(q.dim() == 3 and v.dim() == 3, lambda: "indexed_attention takes [tokens, heads, width]")
    torch._check(q.shape[1] % k.shape[1] == 0, lambda: "query heads must be a multiple of KV heads")
    torch._check(ratio > 0, lambda: "ratio must be positive")
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


def _paged_indexed_attention_fake(q, kv_cache, *operands, head_dim_v, **_):
    torch._check(q.dim() == 3 and kv_cache.dim() == 4)
    torch._check(kv_cache.shape[3] == q.shape[2] + head_dim_v, lambda: "a cache row must be D + head_dim_v")
    return q.new_empty((q.shape[0], q.shape[1], head_dim_v))


INDEXED_ATTENTION = define_op(
    "indexed_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor indices, *, float scale, int ratio) -> Tensor",
    reference=indexed_attention_reference,
    fake=_indexed_attention_fake,
)

PAGED_INDEXED_ATTENTION = define_op(
    "paged_indexed_attention",
    "(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor indices, *, "
    "int head_dim_v, float scale, int ratio) -> Tensor",
    reference=paged_indexed_attention_reference,
    fake=_paged_indexed_attention_fake,
)
