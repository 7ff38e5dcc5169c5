"""`pagebinder::relative_attention` and `paged_relative_attention`: scores with a bias by distance (T5, Inkling).

    score of key j for a query at p  =  scale * q . k  +  bias[h, c],    c = j - p + num_behind, kept in 0 .. N-1

    bias [H, N]     | far behind | ... | -1 | j = p | +1 | ... | far ahead |
    column            0                       num_behind           N - 1        the ends stand for all beyond them

A bias [H, N] depends on weights alone, so it is the same for every step and request (T5); a bias [T, H, N] has a row
of its own for every query (Inkling). T tokens, R requests, H query heads, G KV heads, D head width (Dv of values), N
distances. Cache and metadata are those of `paged.py`. Method: T5, "Exploring the Limits of Transfer Learning with a
Unified Text-to-Text Transformer", section 2.1.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.paged_rows import rows_of_requests
from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.custom_ops.library import define_op


def relative_attention_reference(
    q_THD, k_TGD, v_TGD, bias, sinks=None, *, scale, num_behind, window=None, causal=True
):
    """Attention of one sequence with a bias by distance, computed in float32 and returned in q's dtype.

    Args:
        q_THD: queries [T, H, D]. k_TGD: keys [T, G, D]. v_TGD: values [T, G, Dv]; H is a multiple of G.
        bias: [H, N] or [T, H, N] float; num_behind: its column of distance 0.
        sinks: [H] or [T, H] float32, a logit that joins the softmax without a value row. None: no sink.
        window: key j is visible from query p iff p - window < j (and j < p + window if not causal).
    Returns:
        [T, H, Dv] in q's dtype.
    """
    p = torch.arange(q_THD.shape[0], device=q_THD.device)
    options = {"scale": scale, "num_behind": num_behind, "window": window, "causal": causal}
    return _attend(q_THD, k_TGD, v_TGD, bias, sinks, p, p, **options)


def paged_relative_attention_reference(
    q_THD,
    kv_cache_NGBE,
    block_table_RM,
    seq_lens_R,
    query_start_loc,
    bias,
    sinks=None,
    *,
    head_dim_v,
    scale,
    num_behind,
    window=None,
    causal=True,
):
    """The same over a paged cache; operands as in `paged_attention`.

    Returns:
        [T, H, Dv] in q's dtype, zeros for padding rows.
    Raises:
        ValueError: shapes do not fit, query_start_loc does not rise, or a length exceeds the block table.
    """
    check_bias(q_THD, bias, num_behind)
    check_sinks(q_THD, sinks)
    out = q_THD.new_zeros((*q_THD.shape[:2], head_dim_v))
    step = (block_table_RM, seq_lens_R, query_start_loc)
    options = {"scale": scale, "num_behind": num_behind, "window": window, "causal": causal}
    for tokens, p, j, k, v in rows_of_requests(q_THD, kv_cache_NGBE, *step, window):
        bias_here = bias[tokens] if bias.dim() == 3 else bias
        sinks_here = sinks[tokens] if sinks is not None and sinks.dim() == 2 else sinks
        out[tokens] = _attend(q_THD[tokens], k, v, bias_here, sinks_here, p, j, **options)
    return out


def _attend(q, k, v, bias, sinks, p, j, *, scale, num_behind, window, causal):
    """Queries at positions p [Q] over keys at positions j [K]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    column = (j[None] - p[:, None] + num_behind).clamp(0, bias.shape[-1] - 1)
    if bias.dim() == 2:
        bias_HQK = bias.float()[:, column]
    else:
        rows_HQN = bias.float().transpose(0, 1)
        bias_HQK = rows_HQN.gather(2, column.expand(len(rows_HQN), -1, -1))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * scale + bias_HQK
    visible = visible_keys(p[:, None], j[None], window=window, causal=causal)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sinks_HQ = sinks.float().expand(len(q), -1).T
        scores = torch.cat([scores, sinks_HQ[..., None]], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(k)]
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype).contiguous()


def check_bias(q, bias, num_behind) -> None:
    """Raises ValueError."""
    by_token = bias.dim() == 3 and bias.shape[0] == q.shape[0]
    if (
        not (by_token or bias.dim() == 2)
        or bias.shape[-2] != q.shape[1]
        or not 0 <= num_behind < bias.shape[-1]
    ):
        raise ValueError("bias must be [H, N] or [T, H, N] with num_behind one of its columns")


def check_sinks(q, sinks) -> None:
    """Raises ValueError."""
    if sinks is None:
        return
    by_token = sinks.dim() == 2 and sinks.shape[0] == q.shape[0]
    fits = (by_token or sinks.dim() == 1) and sinks.shape[-1] == q.shape[1]
    if not fits or sinks.dtype is not torch.float32:
        raise ValueError(
            f"sinks must be float32 [H] or [T, H], not {str(sinks.dtype).removeprefix('torch.')} {list(sinks.shape)}"
        )


def _relative_attention_fake(q, k, v, bias, sinks=None, *, scale, num_behind, window=None, causal=True):
    torch._check(q.dim() == 3 and k.dim() == 3 and v.dim() == 3, lambda: "attention takes [T, heads, width]")
    torch._check(q.shape[1] % k.shape[1] == 0, lambda: "query heads must be a multiple of KV heads")
    check_bias(q, bias, num_behind)
    check_sinks(q, sinks)
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


def _paged_relative_attention_fake(
    q, kv_cache, block_table, seq_lens, query_start_loc, bias, sinks=None, *, head_dim_v, scale, num_behind,
    window=None, causal=True,
):  # fmt: skip
    torch._check(kv_cache.shape[3] == q.shape[2] + head_dim_v, lambda: "a cache row must be D + head_dim_v")
    check_bias(q, bias, num_behind)
    check_sinks(q, sinks)
    return q.new_empty((q.shape[0], q.shape[1], head_dim_v))


RELATIVE_ATTENTION = define_op(
    "relative_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? sinks=None, *, float scale, int num_behind, "
    "int? window=None, bool causal=True) -> Tensor",
    reference=relative_attention_reference,
    fake=_relative_attention_fake,
)

PAGED_RELATIVE_ATTENTION = define_op(
    "paged_relative_attention",
    "(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor bias, "
    "Tensor? sinks=None, *, int head_dim_v, float scale, int num_behind, int? window=None, bool causal=True) "
    "-> Tensor",
    reference=paged_relative_attention_reference,
    fake=_paged_relative_attention_fake,
)
