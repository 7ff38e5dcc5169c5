"""What lies between the projections and the attention, in one op: norm of heads, RoPE, the write to the KV cache.

    q [T, H, D] -- rms_norm -- rope ------------------> q for the attention
    k [T, G, D] -- rms_norm -- rope --+
                                      +-- [k | v] ----> kv_cache [N, G, B, D + Dv], at slot_mapping [T]
    v [T, G, Dv] ---------------------+

The norms are optional (Qwen3 has them, Llama has not). Tables of fewer columns turn the leading C channels of a head
and leave the others (Qwen3.5, Phi). It rounds where the separate ops round: after the norm as its
tail says, and after the rotation's products and their sum in the type that q and cos promote to, or in float32 only.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.paged import kv_cache_write_reference
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.norm.rms_norm import rms_norm_reference
from pagebinder.custom_ops.rope.rope import rope_reference

WIDE_STYLES = ("half", "every_two")  # of rope: those whose tables have a column for each channel
STYLES = (*WIDE_STYLES, "chunked", "interleaved")


def qk_norm_rope_write_reference(
    q, k, v, cos, sin, q_weight, k_weight, kv_cache, slot_mapping, *, eps=0.0, tail="", style, in_float32=False
):  # fmt: skip
    """Norm and turn the heads of q and k, and write k and v.

    Args:
        q: [T, H, D]. k: [T, G, D]. v: [T, G, Dv], in the cache's dtype.
        cos, sin: [T, C] or [T, C / 2], as the style says (`rope`), C at most D and even, in q's dtype or float32.
        in_float32: the rotation is, also with tables in q's dtype.
        q_weight, k_weight: [D] of the norms, or None (tail "none").
        kv_cache: [N, G, B, D + Dv], written in place. slot_mapping: [T] int32; negative: not written.
        tail: as in `rms_norm`, or "" for no norms; eps is theirs.
    Returns:
        The queries [T, H, D], contiguous, in q's dtype.
    Raises:
        ValueError: shapes, dtypes or a style that do not fit, or a slot outside the cache.
    """
    q, k = turned_heads(
        q, k, cos, sin, q_weight, k_weight, eps=eps, tail=tail, style=style, in_float32=in_float32
    )
    kv_cache_write_reference(k, v, kv_cache, slot_mapping)
    return q.contiguous()


def turned_heads(q, k, cos, sin, q_weight, k_weight, *, eps, tail, style, in_float32=False):
    """The heads of q and k, normed and turned, in their dtypes. Raises ValueError as `qk_norm_rope_write`."""
    check_operands(q, k, cos, sin, style)
    if tail:
        q = rms_norm_reference(q, q_weight, eps=eps, tail=tail).to(q.dtype)
        k = rms_norm_reference(k, k_weight, eps=eps, tail=tail).to(k.dtype)
    cos, sin, width = cos.unsqueeze(1), sin.unsqueeze(1), turned_channels(cos, style)
    turned = []
    for x in (q, k):
        turning = x[..., :width].float() if in_float32 else x[..., :width]
        leading = rope_reference(turning, cos, sin, style=style).to(x.dtype)
        turned.append(torch.cat([leading, x[..., width:]], dim=-1))
    return turned


def turned_channels(cos, style: str) -> int:
    """How many leading channels of a head turn, from a table [T, columns]."""
    return cos.shape[-1] if style in WIDE_STYLES else 2 * cos.shape[-1]


def check_operands(q, k, cos, sin, style):
    if style not in STYLES:
        raise ValueError(f"style must be one of {', '.join(STYLES)}, not {style!r}")
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[2] % 2:
        raise ValueError(f"q and k must be [T, heads, D], D even, not {tuple(q.shape)}, {tuple(k.shape)}")
    fits = cos.dim() == 2 and cos.shape == sin.shape and cos.shape[0] == q.shape[0]
    width = turned_channels(cos, style) if fits else 0
    if (
        not 0 < width <= q.shape[2]
        or width % 2
        or any(t.dtype not in (q.dtype, torch.float32) for t in (cos, sin))
    ):
        columns = q.shape[2] if style in WIDE_STYLES else q.shape[2] // 2
        raise ValueError(
            f"cos and sin must be [{q.shape[0]}, {columns}] in {q.dtype} or float32, or of fewer columns, for an "
            f"even number of channels, not {cos.dtype} {tuple(cos.shape)} and {sin.dtype} {tuple(sin.shape)}"
        )


def _qk_norm_rope_write_fake(q, *operands, **options):
    return q.new_empty(q.shape)


QK_NORM_ROPE_WRITE = define_op(
    "qk_norm_rope_write",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, "
    'Tensor(a!) kv_cache, Tensor slot_mapping, *, float eps=0.0, str tail="", str style, bool in_float32=False) '
    "-> Tensor",
    reference=qk_norm_rope_write_reference,
    fake=_qk_norm_rope_write_fake,
)
