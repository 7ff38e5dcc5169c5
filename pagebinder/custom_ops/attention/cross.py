"""`pagebinder::cross_attention`: a decoder's tokens read an encoder's, without a cache.

    decoder tokens  q [T, H, D]        every query sees every key: no mask, and no positions, since the two
                       | | |           sequences are not on one axis
    encoder tokens  k [E, G, D], v [E, G, Dv]

T tokens of one request's decoder, E tokens of its encoder, H query heads, G KV heads, D head width (Dv of values).
With a cache the op becomes `kv_cache_write` + `paged_attention(causal=False)` over the encoder's blocks.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op


def cross_attention_reference(q_THD, k_EGD, v_EGD, *, scale, soft_cap=None):
    """Bidirectional attention from T queries to E keys, computed in float32 and returned in q's dtype.

    Args:
        q_THD: queries [T, H, D]. k_EGD: keys [E, G, D]. v_EGD: values [E, G, Dv]; H is a multiple of G, E >= 1.
        scale: factor of q . k. soft_cap: scores become soft_cap * tanh(scores / soft_cap); None = not.
    Returns:
        [T, H, Dv] in q's dtype.
    """
    group = q_THD.shape[1] // k_EGD.shape[1]
    k = k_EGD.float().repeat_interleave(group, dim=1)
    v = v_EGD.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,ehd->hte", q_THD.float(), k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hte,ehd->thd", weights, v).to(q_THD.dtype).contiguous()


def _cross_attention_fake(q, k, v, *, scale, soft_cap=None):
    torch._check(
        q.dim() == 3 and k.dim() == 3 and v.dim() == 3, lambda: "cross_attention takes [rows, heads, D]"
    )
    torch._check(k.shape[0] == v.shape[0], lambda: "keys and values must be of the same encoder tokens")
    torch._check(k.shape[1] == v.shape[1], lambda: "keys and values must have the same number of heads")
    torch._check(q.shape[1] % k.shape[1] == 0, lambda: "query heads must be a multiple of KV heads")
    torch._check(q.shape[2] == k.shape[2], lambda: "q and k must have the same width")
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


CROSS_ATTENTION = define_op(
    "cross_attention",
    "(Tensor q, Tensor k, Tensor v, *, float scale, float? soft_cap=None) -> Tensor",
    reference=cross_attention_reference,
    fake=_cross_attention_fake,
)
