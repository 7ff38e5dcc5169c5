"""`pagebinder::latent_cache_write` and `kv_rope_quant_store`: rows of a latent cache, stored at their slots.

    kv [T, D] --(rotate the trailing channels)--> round --> quantise --> page slot // n, row slot % n

T tokens, D width of a row, N blocks, n rows per block. Byte layouts are those of `layouts`.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.latent.layouts import require, row_layout, rows_per_block, store_rows
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.rope.rope import rope_reference


def latent_cache_write_reference(rows_TD, cache, slot_mapping_T, *, layout="plain", rope_dim=0):
    """Store rows in the cache, in place.

    Args:
        rows_TD: [T, D] of any float type; converted to the cache's type, or rounded to bfloat16 and quantised.
        cache: [N, n, D] of a float type if the layout is "plain", else [N, page bytes] uint8; last stride 1.
        slot_mapping_T: [T] int32, block * n + row. A negative slot (-1) is padding and is not written.
        layout, rope_dim: see `layouts`.
    Raises:
        ValueError: shapes, dtypes or layout do not fit, or a slot lies outside the cache.
    """
    entries = check_rows(rows_TD, cache, slot_mapping_T, layout, rope_dim)
    keep = slot_mapping_T >= 0
    slots = slot_mapping_T[keep]
    require(bool((slots < len(cache) * entries).all()), "a slot in slot_mapping lies outside the cache")
    store_rows(rows_TD[keep], cache, slots, layout, rope_dim)


def kv_rope_quant_store_reference(kv_TD, cos, sin, cache, slot_mapping_T, *, layout="plain", rope_dim=0):
    """Rotate the trailing 2 * cos.shape[1] channels of kv in interleaved pairs, in float32, and store the rows.

    Args:
        cos, sin: [T, pairs] of a float type, of each token's position.
        The others as in `latent_cache_write_reference`; `rope_dim` concerns the layout alone.
    Raises:
        ValueError: as there, or cos and sin do not fit.
    """
    check_tables(kv_TD, cos, sin)
    rows = rotate_trailing(kv_TD.float(), cos.float(), sin.float())
    latent_cache_write_reference(rows, cache, slot_mapping_T, layout=layout, rope_dim=rope_dim)


def rotate_trailing(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of the trailing 2 * cos.shape[-1] channels of x [..., D], in interleaved pairs."""
    rest = x.shape[-1] - 2 * cos.shape[-1]
    rotated = rope_reference(x[..., rest:], cos, sin, style="interleaved")
    return torch.cat([x[..., :rest], rotated], dim=-1)


def check_rows(rows, cache, slot_mapping, layout, rope_dim) -> int:
    require(rows.dim() == 2 and rows.is_floating_point(), "rows are [T, D] of a float type")
    require(slot_mapping.dtype == torch.int32, "slot_mapping must be int32")
    require(slot_mapping.shape == rows.shape[:1], "slot_mapping must have one slot a token")
    return rows_per_block(cache, layout, rows.shape[1], rope_dim)


def check_tables(kv, cos, sin) -> None:
    require(cos.dim() == 2 and cos.shape == sin.shape, "cos and sin are [T, pairs]")
    require(kv.dim() == 2 and len(cos) == len(kv), "cos and sin must have one row a token")
    require(2 * cos.shape[1] <= kv.shape[1], "cos and sin rotate more channels than a row has")
    require(cos.is_floating_point() and cos.dtype == sin.dtype, "cos and sin must have one float type")


def _write_fake(rows, cache, slot_mapping, *, layout="plain", rope_dim=0):
    torch._check(rows.dim() == 2, lambda: "rows are [T, D]")
    if layout == "plain":
        torch._check(cache.dim() == 3 and cache.shape[2] == rows.shape[1], lambda: "a cache is [N, n, D]")
    else:
        row_layout(layout, rows.shape[1], rope_dim)
        torch._check(cache.dim() == 2, lambda: f"an {layout} cache is [N, page bytes]")


def _rope_store_fake(kv, cos, sin, cache, slot_mapping, *, layout="plain", rope_dim=0):
    torch._check(cos.dim() == 2 and 2 * cos.shape[1] <= kv.shape[1], lambda: "cos is [T, pairs]")
    _write_fake(kv, cache, slot_mapping, layout=layout, rope_dim=rope_dim)


LATENT_CACHE_WRITE = define_op(
    "latent_cache_write",
    '(Tensor rows, Tensor(a!) cache, Tensor slot_mapping, *, str layout="plain", int rope_dim=0) -> ()',
    reference=latent_cache_write_reference,
    fake=_write_fake,
)

KV_ROPE_QUANT_STORE = define_op(
    "kv_rope_quant_store",
    "(Tensor kv, Tensor cos, Tensor sin, Tensor(a!) cache, Tensor slot_mapping, *, "
    'str layout="plain", int rope_dim=0) -> ()',
    reference=kv_rope_quant_store_reference,
    fake=_rope_store_fake,
)
