"""`pagebinder::mla_attention`: multi-head latent attention (MLA) of one sequence, without a cache.

T tokens, H heads, L width of the latent, P its width with RoPE added by position (`rope`), N width of q and k without
RoPE (`nope`), V width of a head's values, K listed keys a query, or groups of keys.

    latent c [T, L], k_rope [T, P]      all that a token leaves behind; every head makes its key and value of it:
    k_h = [ w_k_h c | k_rope ]          w_k [H, N, L]
    v_h =   w_v_h c                     w_v [H, V, L]

Two forms give the same result. *Expanded*: as written. *Absorbed*: q_h.(w_k_h c) = (q_h w_k_h).c, so queries become
L + P wide, all heads share one key row [ c | k_rope ] whose leading part is the value, and w_v follows the sum. A
head's sink is a score by itself, the same in both. (DeepSeek-V2, arXiv 2405.04434, section 2.1.)
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.indexed import visible_tokens
from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.custom_ops.library import define_op


def mla_attention_reference(
    q_nope, q_rope, latent, k_rope, w_k, w_v, indices=None, sinks=None, *, scale, window=None, ratio=1
):
    """Causal MLA of one sequence in its expanded form, computed in float32 and returned in q's dtype.

    Args:
        q_nope: [T, H, N]. q_rope: [T, H, P], rotated. latent: [T, L], normed. k_rope: [T, P], rotated.
        w_k: [H, N, L]. w_v: [H, V, L]; any strides.
        indices: [T, K] int32, the keys (positions) that each query sees, -1 = none; None = all. What causality or
            the window hides stays hidden. With a ratio above 1: the groups, each once, and one that the query does
            not see is left out.
        sinks: [H] float32 logit that joins the softmax without a value.
        window: key j is seen from p iff p - window < j.
        ratio: tokens of a group that an index stands for. The query at p sees listed groups w < (p + 1) // ratio,
            and all tokens behind the last of these groups, its tail (`attention.indexed`).
    Returns:
        [T, H, V] in q's dtype. A query that sees no key gets zeros.
    Raises:
        ValueError: shapes do not fit, or an index is not a position.
    """
    check_mla_operands(q_nope, q_rope, w_k, w_v, indices, sinks, ratio)
    num_tokens = q_nope.shape[0]
    if latent.shape != (num_tokens, w_k.shape[2]) or k_rope.shape != (num_tokens, q_rope.shape[2]):
        raise ValueError("latent must be [T, L] and k_rope [T, P]")
    position = torch.arange(num_tokens, device=q_nope.device)
    visible = visible_keys(position[:, None], position[None], window=window)
    if indices is not None:
        visible = visible & listed_keys(indices, num_tokens, position, ratio)
    return attend_expanded(q_nope, q_rope, latent, k_rope, w_k, w_v, visible, scale, sinks)


def attend_expanded(q_nope, q_rope, latent_SL, k_rope_SP, w_k, w_v, visible_TS, scale, sinks=None):
    """Attention of T queries to S keys, in float32: -> [T, H, V] in q's dtype."""
    latent, k_rope = latent_SL.float(), k_rope_SP.float()
    k_SHN = torch.einsum("sl,hnl->shn", latent, w_k.float())
    v_SHV = torch.einsum("sl,hvl->shv", latent, w_v.float())
    scores = torch.einsum("thn,shn->hts", q_nope.float(), k_SHN)
    scores = (scores + torch.einsum("thp,sp->hts", q_rope.float(), k_rope)) * scale
    scores = scores.masked_fill(~visible_TS, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:2], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : len(latent)]
    return torch.einsum("hts,shv->thv", weights, v_SHV).to(q_nope.dtype).contiguous()


def listed_keys(indices_TK, num_keys, p_T, ratio: int = 1):
    """Boolean [T, S]: is key s among those that the query at p lists, by itself or by its group?

    Raises ValueError if an index of a single key is num_keys or more.
    """
    if ratio > 1:
        return visible_tokens(p_T, num_keys, indices_TK, ratio)
    if bool((indices_TK >= num_keys).any()):
        raise ValueError("an index in indices is not a position of the sequence")
    columns = torch.where(indices_TK < 0, num_keys, indices_TK).long()
    listed = torch.zeros((len(indices_TK), num_keys + 1), dtype=torch.bool, device=indices_TK.device)
    return listed.scatter_(1, columns, True)[:, :num_keys]


def check_mla_operands(q_nope, q_rope, w_k, w_v, indices, sinks, ratio: int = 1) -> None:
    """Raises ValueError: queries, weights, indices and sinks do not fit each other."""
    num_tokens, num_heads, width = q_nope.shape
    if q_rope.dim() != 3 or q_rope.shape[:2] != q_nope.shape[:2]:
        raise ValueError("q_nope and q_rope must be [T, H, N] and [T, H, P]")
    if w_k.dim() != 3 or w_k.shape[:2] != (num_heads, width):
        raise ValueError("w_k must be [H, N, L]")
    if w_v.dim() != 3 or (w_v.shape[0], w_v.shape[2]) != (num_heads, w_k.shape[2]):
        raise ValueError("w_v must be [H, V, L]")
    if indices is not None and (indices.dtype != torch.int32 or indices.shape[:1] != (num_tokens,)):
        raise ValueError("indices must be int32 [T, K]")
    if ratio < 1 or (ratio > 1 and indices is None):
        raise ValueError("ratio is that of indices, and positive")
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (num_heads,)):
        raise ValueError("sinks must be float32 [H]")


def _mla_attention_fake(
    q_nope, q_rope, latent, k_rope, w_k, w_v, indices=None, sinks=None, *, scale, window=None, ratio=1
):
    torch._check(q_nope.dim() == 3 and q_rope.dim() == 3, lambda: "mla_attention takes q [T, heads, width]")
    torch._check(latent.dim() == 2 and k_rope.dim() == 2, lambda: "mla_attention takes latents [T, width]")
    torch._check(w_k.shape[0] == q_nope.shape[1], lambda: "w_k must have one matrix a head")
    return q_nope.new_empty((q_nope.shape[0], q_nope.shape[1], w_v.shape[1]))


MLA_ATTENTION = define_op(
    "mla_attention",
    "(Tensor q_nope, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor w_k, Tensor w_v, Tensor? indices=None, "
    "Tensor? sinks=None, *, float scale, int? window=None, int ratio=1) -> Tensor",
    reference=mla_attention_reference,
    fake=_mla_attention_fake,
)
