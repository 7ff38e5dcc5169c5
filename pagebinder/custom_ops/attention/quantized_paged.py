"""`pagebinder::quantized_kv`, `quantized_kv_cache_write`, `quantized_paged_attention`: K and V in one byte a value.

T tokens, R requests, H query heads, G KV heads, D width of q and k, Dv of v, N blocks, B block size, M blocks per
request. The cache is [N, G, B, row bytes] uint8, rows as in `quantized_cache.py`; all else is as in `paged.py`.

    semantic graph      k, v --quantized_kv--> k', v' --attention-->        what the cache will give back
    paged graph         k, v --quantized_kv_cache_write--> bytes --quantized_paged_attention-->
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.paged import paged_attention_reference
from pagebinder.custom_ops.attention.quantized_cache import (
    LARGEST_CODE,
    ROW_SCALE_BYTES,
    decode_kv,
    encode_kv,
)
from pagebinder.custom_ops.library import define_op


def quantized_kv_reference(k_TGD, v_TGD, scales_2G=None, *, codes):
    """K and V after a trip through the cache.

    Args:
        k_TGD: [T, G, D]. v_TGD: [T, G, Dv]. codes: "fp8_e4m3", "fp8_e5m2" or "int8".
        scales_2G: [2, G] float32, fixed scales of K and of V; None: every row has its own.
    Returns:
        (k [T, G, D], v [T, G, Dv]) in their dtypes.
    Raises:
        ValueError: unknown codes, or scales of another shape or dtype.
    """
    check_format(codes, scales_2G, k_TGD.shape[1])
    rows = encode_kv(k_TGD, v_TGD, codes, scales_2G)
    k, v = decode_kv(rows, k_TGD.shape[2], codes, scales_2G).split((k_TGD.shape[2], v_TGD.shape[2]), dim=-1)
    return k.to(k_TGD.dtype).contiguous(), v.to(v_TGD.dtype).contiguous()


def quantized_kv_cache_write_reference(k_TGD, v_TGD, kv_cache_NGBE, slot_mapping_T, scales_2G=None, *, codes):
    """`kv_cache_write` into rows of codes: k, v of any float dtype, cache uint8 with a last stride of 1.

    Raises:
        ValueError: as `kv_cache_write` and `quantized_kv`.
    """
    check_format(codes, scales_2G, k_TGD.shape[1])
    num_blocks, num_heads, block_size, _ = kv_cache_NGBE.shape
    check_cache(kv_cache_NGBE, k_TGD.shape[2] + v_TGD.shape[2], scales_2G)
    _require(k_TGD.shape[:2] == v_TGD.shape[:2], "k and v must agree in tokens and KV heads")
    _require(num_heads == k_TGD.shape[1], "kv_cache and k must have the same number of KV heads")
    _require(slot_mapping_T.dtype == torch.int32, "slot_mapping must be int32")
    _require(slot_mapping_T.shape == k_TGD.shape[:1], "slot_mapping must have one slot a token")
    keep = slot_mapping_T >= 0
    slots = slot_mapping_T[keep].long()
    _require(bool((slots < num_blocks * block_size).all()), "a slot in slot_mapping lies outside kv_cache")
    rows = encode_kv(k_TGD[keep], v_TGD[keep], codes, scales_2G)
    kv_cache_NGBE[slots // block_size, :, slots % block_size] = rows


def quantized_paged_attention_reference(
    q_THD,
    kv_cache_NGBE,
    block_table_RM,
    seq_lens_R,
    query_start_loc,
    sinks=None,
    alibi_slopes=None,
    scales_2G=None,
    *,
    codes,
    head_dim_v,
    **options,
):
    """`paged_attention` over rows of codes, computed in float32 and returned in q's dtype.

    Raises:
        ValueError: as `paged_attention` and `quantized_kv`.
    """
    _require(q_THD.dim() == 3 and kv_cache_NGBE.dim() == 4, "q is [T, H, D] and kv_cache is [N, G, B, bytes]")
    check_format(codes, scales_2G, kv_cache_NGBE.shape[1])
    check_cache(kv_cache_NGBE, q_THD.shape[2] + head_dim_v, scales_2G)
    num_requests, (num_blocks, _, block_size, _) = len(seq_lens_R), kv_cache_NGBE.shape
    longest = int(seq_lens_R.max()) if num_requests else 0
    table = block_table_RM[:num_requests, : max(1, -(-longest // block_size))]
    # Only the blocks of these requests are decoded, each to a block of its own.
    valid = (table >= 0) & (table < num_blocks)
    blocks = kv_cache_NGBE[table.clamp(0, num_blocks - 1).long().flatten()].transpose(1, 2)
    plain = decode_kv(blocks, q_THD.shape[2], codes, scales_2G).transpose(1, 2).contiguous()
    own = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view(table.shape)
    out = paged_attention_reference(
        q_THD.float(), plain, own.masked_fill(~valid, -1), seq_lens_R, query_start_loc, sinks, alibi_slopes,
        head_dim_v=head_dim_v, **options,
    )  # fmt: skip
    return out.to(q_THD.dtype)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_format(codes, scales, num_heads) -> None:
    _require(codes in LARGEST_CODE, f"codes must be one of {', '.join(LARGEST_CODE)}, not {codes!r}")
    fits = scales is None or (scales.dtype == torch.float32 and scales.shape == (2, num_heads))
    _require(fits, "scales must be float32 [2, G]")


def check_cache(kv_cache, row_values, scales) -> None:
    _require(kv_cache.dim() == 4 and kv_cache.dtype == torch.uint8, "a quantised kv_cache must be uint8, 4-D")
    row_bytes = _row_bytes(row_values, scales)
    _require(
        kv_cache.shape[3] == row_bytes,
        f"a kv_cache row must have {row_bytes} bytes, not {kv_cache.shape[3]}",
    )
    _require(kv_cache.stride(3) == 1, "the last stride of kv_cache must be 1")


def _row_bytes(row_values, scales):
    return row_values + (ROW_SCALE_BYTES if scales is None else 0)


def _quantized_kv_fake(k, v, scales=None, *, codes):
    torch._check(k.dim() == 3 and v.dim() == 3, lambda: "k and v are [T, G, width]")
    return torch.empty_like(k).contiguous(), torch.empty_like(v).contiguous()


def _quantized_kv_cache_write_fake(k, v, kv_cache, slot_mapping, scales=None, *, codes):
    torch._check(k.dim() == 3 and v.dim() == 3 and kv_cache.dim() == 4)
    torch._check(kv_cache.shape[1] == k.shape[1], lambda: "kv_cache and k differ in KV heads")
    row_bytes = _row_bytes(k.shape[2] + v.shape[2], scales)
    torch._check(kv_cache.shape[3] == row_bytes, lambda: "a cache row must hold the codes of K and V")


def _quantized_paged_attention_fake(
    q, kv_cache, block_table, seq_lens, query_start_loc, sinks=None, alibi_slopes=None, scales=None, *, codes,
    head_dim_v, **_,
):  # fmt: skip
    torch._check(q.dim() == 3 and kv_cache.dim() == 4)
    torch._check(q.shape[1] % kv_cache.shape[1] == 0, lambda: "query heads must be a multiple of KV heads")
    row_bytes = _row_bytes(q.shape[2] + head_dim_v, scales)
    torch._check(kv_cache.shape[3] == row_bytes, lambda: "a cache row must hold the codes of K and V")
    return q.new_empty((q.shape[0], q.shape[1], head_dim_v))


QUANTIZED_KV = define_op(
    "quantized_kv",
    "(Tensor k, Tensor v, Tensor? scales=None, *, str codes) -> (Tensor, Tensor)",
    reference=quantized_kv_reference,
    fake=_quantized_kv_fake,
)

QUANTIZED_KV_CACHE_WRITE = define_op(
    "quantized_kv_cache_write",
    "(Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? scales=None, *, str codes) -> ()",
    reference=quantized_kv_cache_write_reference,
    fake=_quantized_kv_cache_write_fake,
)

QUANTIZED_PAGED_ATTENTION = define_op(
    "quantized_paged_attention",
    "(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor? sinks=None, "
    "Tensor? alibi_slopes=None, Tensor? scales=None, *, str codes, int head_dim_v, float scale, int? window=None, "
    "int? chunk=None, float? soft_cap=None, bool causal=True) -> Tensor",
    reference=quantized_paged_attention_reference,
    fake=_quantized_paged_attention_fake,
)
