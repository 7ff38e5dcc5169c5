"""`pagebinder_triton::q_norm_rope` and `kv_rope_quant_store`: rows whose trailing channels turn in interleaved pairs.

    norm_rope_kernel     grid [row tiles]    q [T, H, D], a row per head: norm, rounding, rotation, rounding
    rope_store_kernel    grid [row tiles]    kv [T, D], rotated in float32, to the pages of their slots

    a tile     [rows, BLOCK] columns from -ODD on, so that every pair begins at an even one
    x          | rest: not turned .......... | even odd | even odd | ...      pair i: column i of the tables

Both have the roundings of their references; no product is contracted with a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.latent.layouts import rows_per_block
from pagebinder.custom_ops.latent.write import check_rows, check_tables
from pagebinder.custom_ops.norm.q_norm_rope import check_trailing_rope
from pagebinder.custom_ops.triton.latent_rows import RowSizes, cache_strides, is_aligned, store_row_tile
from pagebinder.custom_ops.triton.rms_norm import warps_of
from pagebinder.custom_ops.triton.values import SIZES, rounded, through

TILE_VALUES = 2048


@triton.jit
def turned_trailing(x, cos, sin, is_pair):
    """x [rows, BLOCK] float32 with each pair turned by its angle where there is one; cos, sin [rows, BLOCK / 2]."""
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    even, odd = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
    first = tl.where(is_pair, even * cos - odd * sin, even)
    second = tl.where(is_pair, even * sin + odd * cos, odd)
    return tl.reshape(tl.join(first, second), (ROWS, 2 * HALF))


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, cos_at, sin_at, is_row, REST: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr
):
    """(cos, sin [rows, BLOCK / 2] float32, which pairs turn) of rows whose tables begin at cos_at and sin_at."""
    pair = tl.arange(0, BLOCK // 2)[None, :] - (REST + 1) // 2
    is_pair = is_row[:, None] & (pair >= 0) & (pair < PAIRS)
    cos = tl.load(cos_ptr + cos_at[:, None] + pair, mask=is_pair, other=0).to(tl.float32)
    sin = tl.load(sin_ptr + sin_at[:, None] + pair, mask=is_pair, other=0).to(tl.float32)
    return cos, sin, is_pair


@triton.jit(do_not_specialize=SIZES)
def norm_rope_kernel(
    q_ptr, cos_ptr, sin_ptr, out_ptr, stride_t, stride_h, stride_cos, stride_sin, num_rows, eps, H: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    REST: tl.constexpr = D - 2 * PAIRS
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    token, head = (row // H).to(tl.int64), (row % H).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :] - REST % 2
    mask = is_row[:, None] & (column >= 0) & (column < D)
    x = tl.load(q_ptr + (token * stride_t + head * stride_h)[:, None] + column, mask=mask, other=0).to(
        tl.float32
    )
    y = through(x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None], dtype)
    if PAIRS > 0:
        cos, sin, is_pair = load_angles(
            cos_ptr, sin_ptr, token * stride_cos, token * stride_sin, is_row, REST, PAIRS, BLOCK
        )
        y = turned_trailing(y, cos, sin, is_pair)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * D + column, rounded(y, dtype), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def rope_store_kernel(
    kv_ptr, cos_ptr, sin_ptr, cache_ptr, slots_ptr, stride_t, stride_cos, stride_sin, num_tokens, num_slots,
    stride_n: tl.constexpr, stride_b: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, LAYOUT: tl.constexpr, NOPE: tl.constexpr, QUANT: tl.constexpr,
    ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, NATIVE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    REST: tl.constexpr = D - 2 * PAIRS
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    keep = (slot >= 0) & (slot < num_slots)
    column = tl.arange(0, BLOCK)[None, :] - REST % 2
    row_ptrs = kv_ptr + token.to(tl.int64)[:, None] * stride_t
    x = tl.load(row_ptrs + column, mask=keep[:, None] & (column >= 0) & (column < D), other=0).to(tl.float32)
    if PAIRS > 0:
        at = token.to(tl.int64)
        cos, sin, is_pair = load_angles(
            cos_ptr, sin_ptr, at * stride_cos, at * stride_sin, keep, REST, PAIRS, BLOCK
        )
        x = turned_trailing(x, cos, sin, is_pair)
    page_ptrs = cache_ptr + (slot // N).to(tl.int64) * stride_n
    store_row_tile(
        x, column, page_ptrs, slot % N, keep, stride_b, N, D, BLOCK, LAYOUT, NOPE, QUANT, ROW_BYTES, SCALE_BYTES,
        NATIVE, ALIGNED,
    )  # fmt: skip


def q_norm_rope(q, cos, sin, *, eps):
    """See `q_norm_rope_reference`."""
    check_trailing_rope(q, cos, sin, "q")
    num_tokens, num_heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, cos, sin))
    block, rows = block_of(width, cos.shape[1])
    norm_rope_kernel[(triton.cdiv(num_tokens * num_heads, rows),)](
        q, cos, sin, out, *q.stride()[:2], cos.stride(0), sin.stride(0), num_tokens * num_heads, eps, H=num_heads,
        D=width, PAIRS=cos.shape[1], BLOCK=block, ROWS=rows, num_warps=warps_of(block * rows), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def kv_rope_quant_store(kv, cos, sin, cache, slot_mapping, *, layout="plain", rope_dim=0) -> None:
    """See `kv_rope_quant_store_reference`; a slot outside the cache is not written."""
    check_tables(kv, cos, sin)
    check_rows(kv, cache, slot_mapping, layout, rope_dim)
    store_rows(kv, cache, slot_mapping, layout, rope_dim, cos, sin)


def store_rows(rows, cache, slot_mapping, layout, rope_dim, cos=None, sin=None) -> None:
    """rows [T, D] to their slots, rotated if there are tables [T, pairs]; operands are checked by the callers."""
    num_tokens, width = rows.shape
    if num_tokens == 0:
        return
    n = rows_per_block(cache, layout, width, rope_dim)
    rows, cos, sin = (x if x is None or x.stride(1) == 1 else x.contiguous() for x in (rows, cos, sin))
    pairs = 0 if cos is None else cos.shape[1]
    block, at_once = block_of(width, pairs)
    strides = [0 if x is None else x.stride(0) for x in (rows, cos, sin)]
    options = dict(zip(("stride_n", "stride_b"), cache_strides(cache)))
    rope_store_kernel[(triton.cdiv(num_tokens, at_once),)](
        rows, cos, sin, cache, slot_mapping, *strides, num_tokens, len(cache) * n, **options, N=n, D=width,
        PAIRS=pairs, BLOCK=block, ROWS=at_once, **vars(RowSizes.of(layout, width, rope_dim, rows.device)),
        ALIGNED=is_aligned(cache), num_warps=warps_of(block * at_once), enable_fp_fusion=False,
    )  # fmt: skip


def block_of(width: int, pairs: int) -> tuple[int, int]:
    """(columns, rows) of a tile: one column more where pairs begin at odd channels."""
    block = max(2, triton.next_power_of_2(width + (width - 2 * pairs) % 2))
    return block, max(1, TILE_VALUES // block)
