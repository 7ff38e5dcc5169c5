"""`pagebinder_triton::qk_norm_rope_write`, `qk_norm_rope_quantized_write`: norm of heads, RoPE, cache write in one.

    grid [T, groups of q heads + groups of KV heads]      q: to the result      k, v: to the slot, or as codes

A program holds up to HEADS heads, or KV_HEADS of K and V, as the first and the second channels of the C / 2 pairs
that turn and, if there are any, the others. A pair's channels are STEP * i and, FAR behind it, its second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.attention.paged import check_write
from pagebinder.custom_ops.attention.qk_norm_rope_write import WIDE_STYLES, check_operands, turned_channels
from pagebinder.custom_ops.norm.rms_norm import TAILS
from pagebinder.custom_ops.triton.cache_write import (
    check_quantized_write,
    code_facts,
    load_rows,
    row_scale,
    scale_of_largest,
    slot_row,
    store_encoded,
    store_scales,
)
from pagebinder.custom_ops.triton.e4m3 import magnitude_bits
from pagebinder.custom_ops.triton.rms_norm import scaled, warps_of
from pagebinder.custom_ops.triton.rope import turned
from pagebinder.custom_ops.triton.values import SIZES, rounded, through

TILE_VALUES = 2048


@triton.jit
def normed_and_turned(
    x_ptr, stride_t, stride_h, cos_ptr, sin_ptr, w_ptr, token, head, eps, NUM_HEADS: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr, TAIL: tl.constexpr, HAS_WIDE_TABLES: tl.constexpr,
    STEP: tl.constexpr, FAR: tl.constexpr, IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """(first, second ones of pairs [HEADS, BLOCK], the rest [HEADS, BLOCK_REST] of the heads' type, columns of the
    first, which exist, those of the rest, which exist); without a rest it is the first ones."""
    HALF: tl.constexpr = C // 2
    REST: tl.constexpr = D - C
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first, pair, mask = load_rows(x_ptr, stride_t, stride_h, token, head, HALF, BLOCK, NUM_HEADS, STEP)
    second, _, _ = load_rows(x_ptr + FAR, stride_t, stride_h, token, head, HALF, BLOCK, NUM_HEADS, STEP)
    column = pair * STEP
    first, second = first.to(tl.float32), second.to(tl.float32)
    rest, rest_column, rest_mask = first, column, mask
    if REST > 0:
        rest, rest_column, rest_mask = load_rows(
            x_ptr + C, stride_t, stride_h, token, head, REST, BLOCK_REST, NUM_HEADS
        )
        rest = rest.to(tl.float32)
    if TAIL != "":
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        root = tl.rsqrt(squares / D + eps)[:, None]
        w_1 = first
        w_2 = second
        if w_ptr is not None:
            w_1 = tl.load(w_ptr + column, mask=pair < HALF, other=0).to(tl.float32)
            w_2 = tl.load(w_ptr + FAR + column, mask=pair < HALF, other=0).to(tl.float32)
        first = through(scaled(first, root, w_1, dtype, TAIL), dtype)
        second = through(scaled(second, root, w_2, dtype, TAIL), dtype)
        if REST > 0:
            w_rest = rest
            if w_ptr is not None:
                w_rest = tl.load(w_ptr + C + rest_column, mask=rest_column < REST, other=0).to(tl.float32)
            rest = through(scaled(rest, root, w_rest, dtype, TAIL), dtype)
    COLUMNS: tl.constexpr = C if HAS_WIDE_TABLES else HALF
    SECOND: tl.constexpr = FAR if HAS_WIDE_TABLES else 0
    table = token.to(tl.int64) * COLUMNS + (column if HAS_WIDE_TABLES else pair)
    cos_1 = tl.load(cos_ptr + table, mask=pair < HALF, other=0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + table, mask=pair < HALF, other=0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + table + SECOND, mask=pair < HALF, other=0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + table + SECOND, mask=pair < HALF, other=0).to(tl.float32)
    # The wider of the heads' type and the tables'.
    steps: tl.constexpr = dtype if cos_ptr.dtype.element_ty == dtype and not IN_FLOAT32 else tl.float32
    y_1, y_2 = turned(first, second, cos_1, sin_1, cos_2, sin_2, steps)
    return (
        rounded(y_1, dtype),
        rounded(y_2, dtype),
        rounded(rest, dtype),
        column,
        mask,
        rest_column,
        rest_mask,
    )


@triton.jit
def turn_queries(
    q_ptr, stride_qt, stride_qh, cos_ptr, sin_ptr, weight_ptr, out_ptr, token, group, eps, H: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr,
    TAIL: tl.constexpr, HAS_WIDE_TABLES: tl.constexpr, STEP: tl.constexpr, FAR: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    head = group * HEADS + tl.arange(0, HEADS)
    first, second, rest, column, mask, rest_column, rest_mask = normed_and_turned(
        q_ptr, stride_qt, stride_qh, cos_ptr, sin_ptr, weight_ptr, token, head, eps, H, D, C, BLOCK, BLOCK_REST, TAIL,
        HAS_WIDE_TABLES, STEP, FAR, IN_FLOAT32,
    )  # fmt: skip
    out_ptrs = out_ptr + (token.to(tl.int64) * H + head) * D
    tl.store(out_ptrs[:, None] + column, first, mask=mask)
    tl.store(out_ptrs[:, None] + FAR + column, second, mask=mask)
    if D > C:
        tl.store(out_ptrs[:, None] + C + rest_column, rest, mask=rest_mask)


@triton.jit
def write_keys_and_values(
    k_ptr, v_ptr, stride_kt, stride_kg, stride_vt, stride_vg, cos_ptr, sin_ptr, weight_ptr, row_ptrs, is_slot,
    scales_ptr, token, head, eps, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr, TAIL: tl.constexpr,
    HAS_WIDE_TABLES: tl.constexpr, STEP: tl.constexpr, FAR: tl.constexpr, IN_FLOAT32: tl.constexpr,
    CODES: tl.constexpr, LARGEST: tl.constexpr, ALIGNED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    REST: tl.constexpr = D - C
    first, second, rest, column, mask, rest_column, rest_mask = normed_and_turned(
        k_ptr, stride_kt, stride_kg, cos_ptr, sin_ptr, weight_ptr, token, head, eps, G, D, C, BLOCK, BLOCK_REST, TAIL,
        HAS_WIDE_TABLES, STEP, FAR, IN_FLOAT32,
    )  # fmt: skip
    v, v_column, v_mask = load_rows(v_ptr, stride_vt, stride_vg, token, head, DV, BLOCK_DV, G)
    if CODES == "":
        tl.store(row_ptrs[:, None] + column, first, mask=mask & is_slot)
        tl.store(row_ptrs[:, None] + FAR + column, second, mask=mask & is_slot)
        if REST > 0:
            tl.store(row_ptrs[:, None] + C + rest_column, rest, mask=rest_mask & is_slot)
        tl.store(row_ptrs[:, None] + D + v_column, v, mask=v_mask & is_slot)
    else:
        k_1, k_2, v = first.to(tl.float32), second.to(tl.float32), v.to(tl.float32)
        ROW_SCALES: tl.constexpr = scales_ptr is None
        if ROW_SCALES:
            k_largest = tl.max(tl.maximum(magnitude_bits(k_1), magnitude_bits(k_2)), 1)
            if REST > 0:
                k_largest = tl.maximum(k_largest, tl.max(magnitude_bits(rest.to(tl.float32)), 1))
            k_scale, v_scale = scale_of_largest(k_largest, LARGEST), row_scale(v, LARGEST)
            store_scales(k_scale, v_scale, row_ptrs + D + DV, is_slot & (head < G), ALIGNED)
        else:
            k_scale = tl.load(scales_ptr + head, mask=head < G, other=1.0)
            v_scale = tl.load(scales_ptr + G + head, mask=head < G, other=1.0)
        k_ptrs, v_ptrs = row_ptrs[:, None] + column, row_ptrs[:, None] + D + v_column
        store_encoded(k_1, k_scale, k_ptrs, mask & is_slot, CODES, LARGEST, ROW_SCALES, NATIVE)
        store_encoded(k_2, k_scale, k_ptrs + FAR, mask & is_slot, CODES, LARGEST, ROW_SCALES, NATIVE)
        if REST > 0:
            rest, rest_ptrs = rest.to(tl.float32), row_ptrs[:, None] + C + rest_column
            store_encoded(rest, k_scale, rest_ptrs, rest_mask & is_slot, CODES, LARGEST, ROW_SCALES, NATIVE)
        store_encoded(v, v_scale, v_ptrs, v_mask & is_slot, CODES, LARGEST, ROW_SCALES, NATIVE)


@triton.jit(do_not_specialize=SIZES)
def qk_norm_rope_write_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, cache_ptr, slots_ptr, scales_ptr, out_ptr,
    stride_qt, stride_qh, stride_kt, stride_kg, stride_vt, stride_vg,
    stride_n: tl.constexpr, stride_g: tl.constexpr, stride_b: tl.constexpr, num_slots, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, C: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TAIL: tl.constexpr, HAS_WIDE_TABLES: tl.constexpr, STEP: tl.constexpr,
    FAR: tl.constexpr, IN_FLOAT32: tl.constexpr, CODES: tl.constexpr, LARGEST: tl.constexpr, ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    Q_GROUPS: tl.constexpr = (H + HEADS - 1) // HEADS
    token, group = tl.program_id(0), tl.program_id(1)
    if group < Q_GROUPS:
        turn_queries(
            q_ptr, stride_qt, stride_qh, cos_ptr, sin_ptr, q_weight_ptr, out_ptr, token, group, eps, H, D, C, HEADS,
            BLOCK, BLOCK_REST, TAIL, HAS_WIDE_TABLES, STEP, FAR, IN_FLOAT32,
        )  # fmt: skip
    else:
        head = (group - Q_GROUPS) * KV_HEADS + tl.arange(0, KV_HEADS)
        row_ptrs, is_slot = slot_row(
            cache_ptr, slots_ptr, token, head, stride_n, stride_g, stride_b, num_slots, BLOCK_SIZE
        )
        write_keys_and_values(
            k_ptr, v_ptr, stride_kt, stride_kg, stride_vt, stride_vg, cos_ptr, sin_ptr, k_weight_ptr, row_ptrs,
            is_slot, scales_ptr, token, head, eps, G, D, C, DV, BLOCK, BLOCK_REST, BLOCK_DV, TAIL, HAS_WIDE_TABLES,
            STEP, FAR, IN_FLOAT32, CODES, LARGEST, ALIGNED, NATIVE,
        )  # fmt: skip


def qk_norm_rope_write(
    q, k, v, cos, sin, q_weight, k_weight, kv_cache, slot_mapping, *, eps=0.0, tail="", style, in_float32=False
):  # fmt: skip
    """See `qk_norm_rope_write_reference`; a slot outside the cache is not written."""
    check_operands(q, k, cos, sin, style)
    check_write(k, v, kv_cache, slot_mapping)
    return _launch(
        q, k, v, cos, sin, q_weight, k_weight, kv_cache, slot_mapping, None, "", eps, tail, style, in_float32
    )


def qk_norm_rope_quantized_write(
    q, k, v, cos, sin, q_weight, k_weight, kv_cache, slot_mapping, scales=None, *, codes, eps=0.0, tail="", style,
    in_float32=False,
):  # fmt: skip
    """See `qk_norm_rope_quantized_write_reference`; a slot outside the cache is not written."""
    check_operands(q, k, cos, sin, style)
    check_quantized_write(k, v, kv_cache, slot_mapping, scales, codes)
    return _launch(
        q, k, v, cos, sin, q_weight, k_weight, kv_cache, slot_mapping, scales, codes, eps, tail, style,
        in_float32,
    )  # fmt: skip


def _launch(
    q, k, v, cos, sin, q_weight, k_weight, kv_cache, slot_mapping, scales, codes, eps, tail, style, in_float32
):
    if tail and tail not in TAILS:
        raise ValueError(f"unknown RMSNorm tail {tail!r}; one of {TAILS}")
    for weight in (q_weight, k_weight):
        if (weight is not None) != (tail not in ("", "none")) or (
            weight is not None and len(weight) != q.shape[2]
        ):
            raise ValueError(f"weights must be [{q.shape[2]}] with a tail that has one, else None")
    (num_tokens, num_heads, width), num_kv_heads = q.shape, k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    plain = {"CODES": "", "LARGEST": 0.0, "ALIGNED": False, "NATIVE": False}
    facts = code_facts(kv_cache, k, v, codes) if codes else plain
    turned_width, are_neighbours = turned_channels(cos, style), style in ("every_two", "interleaved")
    block, block_rest = (triton.next_power_of_2(max(n, 1)) for n in (turned_width // 2, width - turned_width))
    values = triton.next_power_of_2(2 * block + (block_rest if turned_width < width else 0))
    heads = triton.next_power_of_2(min(num_heads, max(1, TILE_VALUES // values)))
    kv_heads = min(heads, triton.next_power_of_2(num_kv_heads))  # rows beyond them would be encoded, too
    groups = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, kv_heads)
    qk_norm_rope_write_kernel[num_tokens, groups](
        q, k, v, cos.contiguous(), sin.contiguous(), q_weight, k_weight, kv_cache, slot_mapping, scales, out,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *kv_cache.stride()[:3],
        kv_cache.shape[0] * kv_cache.shape[2], eps, H=num_heads, G=num_kv_heads, D=width, C=turned_width,
        DV=v.shape[2], HEADS=heads, KV_HEADS=kv_heads, BLOCK=block, BLOCK_REST=block_rest,
        BLOCK_DV=triton.next_power_of_2(v.shape[2]), BLOCK_SIZE=kv_cache.shape[2], TAIL=tail,
        HAS_WIDE_TABLES=style in WIDE_STYLES, STEP=2 if are_neighbours else 1,
        FAR=1 if are_neighbours else turned_width // 2, IN_FLOAT32=in_float32, **facts,
        num_warps=warps_of(values * heads), enable_fp_fusion=False,
    )  # fmt: skip
    return out
