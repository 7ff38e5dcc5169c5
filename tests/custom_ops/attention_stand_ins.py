"""Stand-ins for attention libraries: their documented calls in a few lines of plain PyTorch, one query at a time.

They check what they are given, so that an adapter that hands over wrong metadata fails here and not on a GPU.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch


def attend_one(q_HD, k_SGD, v_SGD, sees_S, scale, softcap, bias_HS):
    """(out [H, D], log-sum-exp [H]) of one query."""
    group = q_HD.shape[0] // k_SGD.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k_SGD, v_SGD))
    scores = torch.einsum("hd,shd->hs", q_HD.float(), k) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = (scores + bias_HS).masked_fill(~sees_S, float("-inf"))
    out = torch.einsum("hs,shd->hd", scores.softmax(-1).nan_to_num(0.0), v)
    return out.to(q_HD.dtype), scores.logsumexp(-1)


def within(p: int, length: int, left: int, right: int) -> torch.Tensor:
    j = torch.arange(length)
    return ((j >= p - left) | (left < 0)) & ((j <= p + right) | (right < 0))


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size, softcap,
    alibi_slopes, block_table, return_attn_probs,
):  # fmt: skip
    """FlashAttention 2 over pages [N, B, G, D]; rows outside the requests are not written."""
    assert k.stride(-1) == v.stride(-1) == 1 and cu_seqlens_k.dtype == torch.int32
    lens = cu_seqlens_k.diff()
    assert max_seqlen_k >= int(lens.max()) and max_seqlen_q >= int(cu_seqlens_q.diff().max())
    left, right = window_size
    out = torch.full((*q.shape[:2], v.shape[-1]), float("nan"), dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    for r, length in enumerate(lens.tolist()):
        start, end = cu_seqlens_q[r : r + 2].tolist()
        j = torch.arange(length)
        rows = (block_table[r].long()[j // k.shape[1]], j % k.shape[1])
        for t in range(start, end):
            p = length - end + t
            slopes = torch.zeros(q.shape[1]) if alibi_slopes is None else alibi_slopes
            bias = -slopes[:, None] * (p - j).abs()
            sees = within(p, length, left, 0 if causal else right)
            out[t], lse[:, t] = attend_one(q[t], k[rows], v[rows], sees, softmax_scale, softcap, bias)
    return (out, lse, None) if return_attn_probs else out


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's, for pages [N, G, B, D]."""

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        for indptr in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert indptr.dtype == torch.int32 and indptr.device.type == "cpu"
        assert len(paged_kv_indices) == paged_kv_indptr[-1] and q_data_type == kv_data_type
        self.step = SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"})

    def run(self, q, paged_kv_cache, return_lse=False):
        s, (k, v) = self.step, paged_kv_cache
        assert (
            len(q) == s.qo_indptr[-1]
            and q.is_contiguous()
            and k.stride() == v.stride()
            and k.shape[2] == s.page_size
        )
        out, lse = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype), torch.zeros(q.shape[:2])
        for r in range(len(s.qo_indptr) - 1):
            start, end = s.qo_indptr[r : r + 2].tolist()
            pages = s.paged_kv_indices[s.paged_kv_indptr[r] : s.paged_kv_indptr[r + 1]].long()
            length = max(0, len(pages) - 1) * s.page_size + int(s.paged_kv_last_page_len[r])
            keys, values = (x[pages].transpose(1, 2).flatten(0, 1)[:length] for x in (k, v))
            for t in range(start, end):
                sees = within(length - end + t, length, s.window_left, 0 if s.causal else -1)
                bias = torch.zeros(q.shape[1], length)
                out[t], lse[t] = attend_one(q[t], keys, values, sees, s.sm_scale, s.logits_soft_cap, bias)
        return (out, lse / math.log(2)) if return_lse else out


def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
    assert cache_seqlens.dtype == torch.int32 and num_heads_k == 1
    return ("metadata", num_q_tokens_per_head_k), "splits"


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, num_splits, *, softmax_scale, causal
):
    """FlashMLA's dense form: q [R, S, H, 576], pages [N, 64, 1, 576]; the last query sees all keys."""
    assert causal and k_cache.shape[1:] == (64, 1, 576) and metadata == ("metadata", q.shape[1] * q.shape[2])
    out = torch.full((*q.shape[:3], head_dim_v), float("nan"), dtype=q.dtype)
    for r, length in enumerate(cache_seqlens.tolist()):
        j = torch.arange(length)
        rows = k_cache[block_table[r].long()[j // 64], j % 64]
        for i in range(q.shape[1]):
            p = length - q.shape[1] + i
            bias = torch.zeros(q.shape[2], length)
            out[r, i], _ = attend_one(
                q[r, i], rows, rows[..., :head_dim_v], j <= p, softmax_scale, None, bias
            )
    return out, None


flash_mla = SimpleNamespace(get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache)
flash_attn = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
flashinfer = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)
