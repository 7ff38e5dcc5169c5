"""`pagebinder::attention`: what an attention layer computes, without a cache.

This is the op that capture puts in place of every attention layer and that recognisers produce from raw forms.
It serves one sequence of T tokens: T tokens, H query heads, G KV heads, D head width (Dv for values).
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op


def attention_reference(
    q_THD,
    k_TGD,
    v_TGD,
    sinks=None,
    alibi_slopes=None,
    *,
    scale,
    window=None,
    chunk=None,
    soft_cap=None,
    causal=True,
):
    """Attention of one sequence, computed in float32 and returned in q's dtype.

    Scores are scaled, soft-capped, masked, biased by ALiBi and normalised together with the per-head sink.

    Args:
        q_THD: queries [T, H, D]. k_TGD: keys [T, G, D]. v_TGD: values [T, G, Dv]; H is a multiple of G.
        sinks: per-head sink logit [H] float32, joins the softmax without a value row. None = no sink.
        alibi_slopes: per-head slope [H] float32, adds slope * (j - p) to the score of key j at query p.
        window: key j is visible from query p iff p - window < j. chunk: iff j // chunk == p // chunk.
        soft_cap: c * tanh(score / c).
    Returns:
        [T, H, Dv] in q's dtype. A query that sees no key gets zeros.
    """
    num_tokens, num_heads, _ = q_THD.shape
    group = num_heads // k_TGD.shape[1]
    k = k_TGD.float().repeat_interleave(group, dim=1)
    v = v_TGD.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q_THD.float(), k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(num_tokens, device=q_THD.device)
    visible = visible_keys(position[:, None], position[None, :], window=window, chunk=chunk, causal=causal)
    scores = scores.masked_fill(~visible, float("-inf"))
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.float()[:, None, None] * (position[None, :] - position[:, None])
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, num_tokens, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.einsum("hts,shd->thd", weights, v).to(q_THD.dtype).contiguous()


def visible_keys(p, j, *, window=None, chunk=None, causal=True):
    """Boolean mask: does the query at position p see the key at position j? (p and j broadcast)"""
    visible = j <= p if causal else torch.ones_like(j <= p)
    if window is not None:
        visible = visible & (j > p - window)
        if not causal:
            visible = visible & (j < p + window)
    if chunk is not None:
        visible = visible & (j // chunk == p // chunk)
    return visible


def _attention_fake(q, k, v, sinks=None, alibi_slopes=None, *, scale, window=None, chunk=None, soft_cap=None,
                    causal=True):  # fmt: skip
    torch._check(q.dim() == 3 and k.dim() == 3 and v.dim() == 3, lambda: "attention takes [T, heads, width]")
    torch._check(q.shape[1] % k.shape[1] == 0, lambda: "query heads must be a multiple of KV heads")
    torch._check(q.shape[2] == k.shape[2], lambda: "q and k must have the same width")
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


ATTENTION = define_op(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks=None, Tensor? alibi_slopes=None, *, float scale, "
    "int? window=None, int? chunk=None, float? soft_cap=None, bool causal=True) -> Tensor",
    reference=attention_reference,
    fake=_attention_fake,
)
