"""`qk_norm_rope_write` for a cache of codes: norm of heads, RoPE, and rows of one byte a value.

    q [T, H, D] -- rms_norm -- rope -------------------------> q for the attention
    k [T, G, D] -- rms_norm -- rope --+
                                      +-- encode -- bytes ---> kv_cache [N, G, B, row bytes], at slot_mapping [T]
    v [T, G, Dv] ---------------------+

Keys are rounded to their dtype before they are encoded, as between the separate ops. Rows: `quantized_cache.py`.
"""

from __future__ import annotations

from pagebinder.custom_ops.attention.qk_norm_rope_write import turned_heads
from pagebinder.custom_ops.attention.quantized_paged import quantized_kv_cache_write_reference
from pagebinder.custom_ops.library import define_op


def qk_norm_rope_quantized_write_reference(
    q, k, v, cos, sin, q_weight, k_weight, kv_cache, slot_mapping, scales=None, *, codes, eps=0.0, tail="", style,
    in_float32=False,
):  # fmt: skip
    """Norm and turn the heads of q and k, and write codes of k and v.

    Args:
        kv_cache: [N, G, B, row bytes] uint8, written in place.
        codes, scales: as in `quantized_kv_cache_write`. The others: as in `qk_norm_rope_write`.
    Returns:
        The queries [T, H, D], contiguous, in q's dtype.
    Raises:
        ValueError: as `qk_norm_rope_write` and `quantized_kv_cache_write`.
    """
    q, k = turned_heads(
        q, k, cos, sin, q_weight, k_weight, eps=eps, tail=tail, style=style, in_float32=in_float32
    )
    quantized_kv_cache_write_reference(k, v, kv_cache, slot_mapping, scales, codes=codes)
    return q.contiguous()


QK_NORM_ROPE_QUANTIZED_WRITE = define_op(
    "qk_norm_rope_quantized_write",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, "
    "Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? scales=None, *, str codes, float eps=0.0, "
    'str tail="", str style, bool in_float32=False) -> Tensor',
    reference=qk_norm_rope_quantized_write_reference,
    fake=lambda q, *operands, **options: q.new_empty(q.shape),
)
