"""`pagebinder::kv_cache_write`, `paged_attention` and `paged_attention_lse`: attention over a paged KV cache.

T tokens, R requests, H query heads, G KV heads, D width of q and k, Dv width of v, N blocks, B block size,
M blocks per request at most.

    kv_cache [N, G, B, D+Dv]        block_table [R, M]          one row of a block
      block 0   block 1   block 2     request 0: 2 0 .            +-----------+-----------+
      +-------+ +-------+ +-------+   request 1: 1 . .            | K (D)     | V (Dv)    |
      | r0 t4 | | r1 t0 | | r0 t0 |                               +-----------+-----------+
      |  ...  | |  ...  | |  ...  |   slot of position p = block_table[r, p // B] * B + p % B
      +-------+ +-------+ +-------+

All tokens of a step lie flat, one request after another; `query_start_loc` [R+1] says where each begins,
and `seq_lens` [R] how long each is including its new tokens, so query i of a request sits at the absolute
position p = seq_len - query_len + i. Tokens from `query_start_loc[R]` on are padding.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.query_starts import query_starts


def kv_cache_write_reference(k_TGD, v_TGD, kv_cache_NGBE, slot_mapping_T):
    """Scatter new K and V rows into the cache, in place.

    Args:
        k_TGD: keys [T, G, D]. v_TGD: values [T, G, Dv], of the cache's dtype.
        kv_cache_NGBE: [N, G, B, D+Dv], last stride 1, otherwise any strides (a view of a larger arena).
        slot_mapping_T: [T] int32, block * B + offset. A negative slot (-1) is padding and is not written.
    Raises:
        ValueError: shapes or dtypes do not fit, or a slot lies outside the cache.
    """
    check_write(k_TGD, v_TGD, kv_cache_NGBE, slot_mapping_T)
    num_blocks, _, block_size, _ = kv_cache_NGBE.shape
    keep = slot_mapping_T >= 0
    slots = slot_mapping_T[keep].long()
    _require(bool((slots < num_blocks * block_size).all()), "a slot in slot_mapping lies outside kv_cache")
    kv_cache_NGBE[slots // block_size, :, slots % block_size] = torch.cat([k_TGD, v_TGD], dim=-1)[keep]


def paged_attention_lse_reference(
    q_THD,
    kv_cache_NGBE,
    block_table_RM,
    seq_lens_R,
    query_start_loc,
    sinks=None,
    alibi_slopes=None,
    *,
    head_dim_v,
    scale,
    window=None,
    chunk=None,
    soft_cap=None,
    causal=True,
):
    """Attention of a mixed batch over the paged cache; returns (out, lse).

    Every score is scaled, soft-capped (c * tanh(s / c)), masked, biased by ALiBi, and normalised together
    with the sink of its head. One call serves prefill chunks, decodes and extends over a cached prefix.

    Args:
        q_THD: queries [T, H, D], last stride 1; H is a multiple of G, head h reads KV head h // (H // G).
        kv_cache_NGBE: [N, G, B, D+Dv], already holding the K and V of the new tokens.
        block_table_RM: [R or more, M] int32, R = len(seq_lens). Entries that no query of the request can see
            are never read.
        seq_lens_R: [R] int32, tokens in the cache including the new ones; 0 is allowed.
        query_start_loc: [R+1] int32, first query of each request; entry R is the number of real tokens.
        sinks: [H] float32 logit that joins the softmax without a value row; -inf is the identity.
        alibi_slopes: [H] float32; slope * (j - p) is added to the score of key j at query position p.
        head_dim_v: Dv. window: key j is seen iff p - window < j (and j < p + window if not causal).
        chunk: iff j // chunk == p // chunk. causal: iff j <= p; otherwise every j < seq_len.
    Returns:
        out [T, H, Dv] contiguous in q's dtype, zeros for padding and for a query that sees no key.
        lse [H, T] float32: log-sum-exp of the scores WITHOUT the sink, -inf where no key is seen. So
        out == out_without_sink * sigmoid(lse - sink), and parts of a split KV range merge by their lse
        with the sink applied once, to one part or after the merge.
    Raises:
        ValueError: shapes or dtypes do not fit, a length exceeds the block table, or a block id is not valid.
    """
    check_attention(
        q_THD, kv_cache_NGBE, block_table_RM, seq_lens_R, query_start_loc, sinks, alibi_slopes, head_dim_v
    )
    check_options(window=window, chunk=chunk, soft_cap=soft_cap)
    num_tokens, num_heads, head_dim = q_THD.shape
    num_blocks, num_kv_heads, block_size, _ = kv_cache_NGBE.shape
    group = num_heads // num_kv_heads
    out = q_THD.new_zeros((num_tokens, num_heads, head_dim_v))
    lse = torch.full((num_heads, num_tokens), float("-inf"), device=q_THD.device)
    starts = query_starts(query_start_loc, num_tokens)
    for r, seq_len in enumerate(seq_lens_R.tolist()):
        start, end = starts[r], starts[r + 1]
        _require(0 <= seq_len <= block_table_RM.shape[1] * block_size, "a seq_len exceeds its block table")
        p = torch.arange(start - end, 0, device=q_THD.device)[:, None] + seq_len
        j = torch.arange(seq_len, device=q_THD.device)
        visible = visible_keys(p, j[None], window=window, chunk=chunk, causal=causal)
        j, visible = j[visible.any(0)], visible[:, visible.any(0)]
        if j.numel() == 0:
            continue
        blocks = block_table_RM[r].long()[j // block_size]
        _require(
            bool(((blocks >= 0) & (blocks < num_blocks)).all()), "a block id in block_table is not valid"
        )
        kv = kv_cache_NGBE[blocks, :, j % block_size].float().repeat_interleave(group, dim=1)
        k, v = kv[..., :head_dim], kv[..., head_dim:]
        scores = torch.einsum("qhd,khd->hqk", q_THD[start:end].float(), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[:, None, None] * (j[None] - p)
        row_lse = torch.logsumexp(scores, dim=-1)
        total = row_lse if sinks is None else torch.logaddexp(row_lse, sinks[:, None])
        shift = total.masked_fill(total == float("-inf"), 0.0)
        weights = torch.exp(scores - shift[..., None])
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q_THD.dtype)
        lse[:, start:end] = row_lse
    return out, lse


def paged_attention_reference(
    q, kv_cache, block_table, seq_lens, query_start_loc, sinks=None, alibi_slopes=None, **options
):
    """`paged_attention_lse_reference` without the LSE."""
    return paged_attention_lse_reference(
        q, kv_cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes, **options
    )[0]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_write(k, v, kv_cache, slot_mapping) -> None:
    _require(k.dim() == 3 and v.dim() == 3 and kv_cache.dim() == 4, "k, v are [T, G, width], kv_cache 4-D")
    _require(k.shape[:2] == v.shape[:2], "k and v must agree in tokens and KV heads")
    _require(kv_cache.shape[1] == k.shape[1], "kv_cache and k must have the same number of KV heads")
    _require(kv_cache.shape[3] == k.shape[2] + v.shape[2], "a kv_cache row must hold one K and one V row")
    _require(k.dtype == v.dtype == kv_cache.dtype, "k, v and kv_cache must have the same dtype")
    _require(kv_cache.stride(3) == 1, "the last stride of kv_cache must be 1")
    _require(slot_mapping.dtype == torch.int32, "slot_mapping must be int32")
    _require(slot_mapping.shape == k.shape[:1], "slot_mapping must have one slot a token")


def check_attention(
    q, kv_cache, block_table, seq_lens, query_start_loc, sinks, alibi_slopes, head_dim_v
) -> None:
    _require(q.dim() == 3 and kv_cache.dim() == 4, "q is [T, H, D] and kv_cache is [N, G, B, D+Dv]")
    _require(q.shape[1] % kv_cache.shape[1] == 0, "query heads must be a multiple of KV heads")
    _require(kv_cache.shape[3] == q.shape[2] + head_dim_v, "a kv_cache row must be D + head_dim_v wide")
    _require(q.dtype == kv_cache.dtype, "q and kv_cache must have the same dtype")
    _require(kv_cache.stride(3) == 1 and q.stride(2) == 1, "the last strides of q and kv_cache must be 1")
    for name, tensor in (
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        _require(tensor.dtype == torch.int32, f"{name} must be int32")
    _require(block_table.dim() == 2, "block_table is [R, M]")
    _require(
        seq_lens.dim() == 1 and len(seq_lens) <= block_table.shape[0],
        "seq_lens must have one entry a request, and block_table at least as many rows",
    )
    _require(
        query_start_loc.shape == (len(seq_lens) + 1,),
        "query_start_loc must have one entry more than seq_lens",
    )
    for name, tensor in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        fits = tensor is None or (tensor.dtype == torch.float32 and tensor.shape == q.shape[1:2])
        _require(fits, f"{name} must be float32 [H]")


def check_options(**options) -> None:
    for name, value in options.items():
        _require(value is None or value > 0, f"{name} must be positive")


def _kv_cache_write_fake(k, v, kv_cache, slot_mapping):
    torch._check(k.dim() == 3 and v.dim() == 3 and kv_cache.dim() == 4)
    torch._check(kv_cache.shape[1] == k.shape[1], lambda: "kv_cache and k differ in KV heads")
    torch._check(kv_cache.shape[3] == k.shape[2] + v.shape[2], lambda: "a cache row must hold K and V")


def _paged_attention_fake(
    q, kv_cache, block_table, seq_lens, query_start_loc, sinks=None, alibi_slopes=None, *, head_dim_v, **_
):
    torch._check(q.dim() == 3 and kv_cache.dim() == 4)
    torch._check(q.shape[1] % kv_cache.shape[1] == 0, lambda: "query heads must be a multiple of KV heads")
    torch._check(kv_cache.shape[3] == q.shape[2] + head_dim_v, lambda: "a cache row must be D + head_dim_v")
    return q.new_empty((q.shape[0], q.shape[1], head_dim_v))


def _paged_attention_lse_fake(q, *operands, **options):
    out = _paged_attention_fake(q, *operands, **options)
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


_ATTENTION_OPERANDS = (
    "(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, *, int head_dim_v, float scale, int? window=None, "
    "int? chunk=None, float? soft_cap=None, bool causal=True)"
)

KV_CACHE_WRITE = define_op(
    "kv_cache_write",
    "(Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()",
    reference=kv_cache_write_reference,
    fake=_kv_cache_write_fake,
)

PAGED_ATTENTION = define_op(
    "paged_attention",
    _ATTENTION_OPERANDS + " -> Tensor",
    reference=paged_attention_reference,
    fake=_paged_attention_fake,
)

PAGED_ATTENTION_LSE = define_op(
    "paged_attention_lse",
    _ATTENTION_OPERANDS + " -> (Tensor, Tensor)",
    reference=paged_attention_lse_reference,
    fake=_paged_attention_lse_fake,
)
