"""`pagebinder::lookahead_attention` and `paged_lookahead_attention`: causal attention in which some queries see on.

    tokens       t0  t1  i0  i1  i2  t2          i0 .. i2: parts of an image
    lookahead     0   0   2   1   0   0          a query at p sees keys up to p + lookahead
    t0            x
    t1            x   x
    i0            x   x   x   x   x              what has not been written yet cannot be seen: all parts of an image
    i1            x   x   x   x   x              must be new tokens of one step
    i2            x   x   x   x   x
    t2            x   x   x   x   x   x

T tokens, R requests, H query heads, G KV heads, D head width (Dv of values). Cache and metadata are those of
`paged.py`. A window bounds what is behind a query and nothing else.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.paged import check_attention, check_options
from pagebinder.custom_ops.attention.paged_rows import rows_of_requests
from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.custom_ops.library import define_op


def lookahead_attention_reference(
    q_THD, k_TGD, v_TGD, lookahead_T, sinks=None, *, scale, window=None, soft_cap=None
):
    """Attention of one sequence, computed in float32 and returned in q's dtype.

    Args:
        q_THD: queries [T, H, D]. k_TGD: keys [T, G, D]. v_TGD: values [T, G, Dv]; H is a multiple of G.
        lookahead_T: [T] int32, from 0 on. window: key j is seen from p iff p - window < j <= p + lookahead.
        sinks, soft_cap: as of `attention`.
    Returns:
        [T, H, Dv] in q's dtype.
    Raises:
        ValueError: lookahead of another shape or dtype.
    """
    check_lookahead(q_THD, lookahead_T)
    p = torch.arange(len(q_THD), device=q_THD.device)
    visible = _visible(p, p, lookahead_T, window)
    return _attend(q_THD, k_TGD, v_TGD, visible, sinks, scale, soft_cap)


def paged_lookahead_attention_reference(
    q_THD,
    kv_cache_NGBE,
    block_table_RM,
    seq_lens_R,
    query_start_loc,
    lookahead_T,
    sinks=None,
    *,
    head_dim_v,
    scale,
    window=None,
    soft_cap=None,
):
    """The same over a paged cache; operands as in `paged_attention`. Keys beyond a request's length are not seen.

    Returns:
        [T, H, Dv] in q's dtype, zeros for padding rows.
    Raises:
        ValueError: shapes or dtypes do not fit, or a length exceeds the block table.
    """
    check_attention(
        q_THD, kv_cache_NGBE, block_table_RM, seq_lens_R, query_start_loc, sinks, None, head_dim_v
    )
    check_options(window=window, soft_cap=soft_cap)
    check_lookahead(q_THD, lookahead_T)
    out = q_THD.new_zeros((*q_THD.shape[:2], head_dim_v))
    step = (block_table_RM, seq_lens_R, query_start_loc)
    for tokens, p, j, k, v in rows_of_requests(q_THD, kv_cache_NGBE, *step, window):
        visible = _visible(p, j, lookahead_T[tokens], window)
        out[tokens] = _attend(q_THD[tokens], k, v, visible, sinks, scale, soft_cap)
    return out


def _visible(p, j, lookahead, window):
    """[Q, K]: p [Q] positions of queries, j [K] of keys."""
    near = visible_keys(p[:, None], j[None], window=window)
    ahead = (j[None] > p[:, None]) & (j[None] <= (p + lookahead)[:, None])
    return near | ahead


def _attend(q, k, v, visible, sinks, scale, soft_cap):
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(k)]
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype).contiguous()


def check_lookahead(q, lookahead) -> None:
    """Raises ValueError."""
    if lookahead.dtype != torch.int32 or lookahead.shape != q.shape[:1]:
        raise ValueError("lookahead must be int32 [T]")


def _lookahead_attention_fake(q, k, v, lookahead, sinks=None, *, scale, window=None, soft_cap=None):
    torch._check(q.dim() == 3 and k.dim() == 3 and v.dim() == 3, lambda: "attention takes [T, heads, width]")
    torch._check(q.shape[1] % k.shape[1] == 0, lambda: "query heads must be a multiple of KV heads")
    torch._check(lookahead.dim() == 1, lambda: "lookahead is [T]")
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


def _paged_lookahead_attention_fake(
    q, kv_cache, block_table, seq_lens, query_start_loc, lookahead, sinks=None, *, head_dim_v, scale, window=None,
    soft_cap=None,
):  # fmt: skip
    torch._check(kv_cache.shape[3] == q.shape[2] + head_dim_v, lambda: "a cache row must be D + head_dim_v")
    torch._check(lookahead.dim() == 1, lambda: "lookahead is [T]")
    return q.new_empty((q.shape[0], q.shape[1], head_dim_v))


LOOKAHEAD_ATTENTION = define_op(
    "lookahead_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor lookahead, Tensor? sinks=None, *, float scale, int? window=None, "
    "float? soft_cap=None) -> Tensor",
    reference=lookahead_attention_reference,
    fake=_lookahead_attention_fake,
)

PAGED_LOOKAHEAD_ATTENTION = define_op(
    "paged_lookahead_attention",
    "(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor lookahead, "
    "Tensor? sinks=None, *, int head_dim_v, float scale, int? window=None, float? soft_cap=None) -> Tensor",
    reference=paged_lookahead_attention_reference,
    fake=_paged_lookahead_attention_fake,
)
