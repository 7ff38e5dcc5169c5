"""`pagebinder_triton::kv_cache_write` and `quantized_kv_cache_write`: new K and V rows to their slots.

    grid [T, groups of heads]: a program copies, or encodes, the K and V rows of up to HEADS heads of a token

Slots are not checked on the host, which would have to wait for the device: a negative slot and one outside the cache
are not written. Rows of codes are those of `quantized_cache.py`, to the bit; strides of their cache are constants
of a kernel, see `attention_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagebinder.custom_ops.attention.paged import check_write
from pagebinder.custom_ops.attention.quantized_cache import LARGEST_CODE
from pagebinder.custom_ops.attention.quantized_paged import check_cache, check_format
from pagebinder.custom_ops.triton.e4m3 import magnitude_bits
from pagebinder.custom_ops.triton.gpu import has_fp8
from pagebinder.custom_ops.triton.values import SIZES, encoded

TILE_VALUES = 2048  # of K and V that a program holds at a time, or one head's


@triton.jit
def slot_row(
    cache_ptr, slots_ptr, token, head, stride_n, stride_g, stride_b, num_slots, BLOCK_SIZE: tl.constexpr
):
    """(pointers to the rows of heads at a token's slot, whether there is such a slot)."""
    slot = tl.load(slots_ptr + token)
    is_slot = (slot >= 0) & (slot < num_slots)
    row = (slot // BLOCK_SIZE).to(tl.int64) * stride_n + (slot % BLOCK_SIZE).to(tl.int64) * stride_b
    return cache_ptr + row + head.to(tl.int64) * stride_g, is_slot


@triton.jit
def load_rows(
    x_ptr, stride_t, stride_g, token, head, D: tl.constexpr, BLOCK: tl.constexpr, NUM_HEADS: tl.constexpr,
    STEP: tl.constexpr = 1,
):  # fmt: skip
    """(rows [HEADS, BLOCK], columns [1, BLOCK], which of them exist); every STEP-th channel."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = (head[:, None] < NUM_HEADS) & (column < D)
    ptrs = x_ptr + token.to(tl.int64) * stride_t + head.to(tl.int64)[:, None] * stride_g + column * STEP
    return tl.load(ptrs, mask=mask, other=0), column, mask


@triton.jit(do_not_specialize=SIZES)
def copy_kernel(
    k_ptr, v_ptr, cache_ptr, slots_ptr, stride_kt, stride_kg, stride_vt, stride_vg, stride_n, stride_g, stride_b,
    num_slots, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row_ptrs, is_slot = slot_row(
        cache_ptr, slots_ptr, token, head, stride_n, stride_g, stride_b, num_slots, BLOCK_SIZE
    )
    k, column, mask = load_rows(k_ptr, stride_kt, stride_kg, token, head, D, BLOCK_D, NUM_HEADS)
    tl.store(row_ptrs[:, None] + column, k, mask=mask & is_slot)
    v, column, mask = load_rows(v_ptr, stride_vt, stride_vg, token, head, DV, BLOCK_DV, NUM_HEADS)
    tl.store(row_ptrs[:, None] + D + column, v, mask=mask & is_slot)


@triton.jit
def row_scale(x, LARGEST: tl.constexpr):
    """Rows [HEADS, BLOCK] float32 -> the scale [HEADS] of each; NaN where a row has one."""
    return scale_of_largest(tl.max(magnitude_bits(x), 1), LARGEST)


@triton.jit
def scale_of_largest(largest_bits, LARGEST: tl.constexpr):
    """`magnitude_bits` of a row's largest -> its scale; NaN of one."""
    largest = largest_bits.to(tl.float32, bitcast=True)
    scale = tl.maximum(
        tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), 1.1754943508222875e-38
    )
    return tl.where(largest_bits > 0x7F800000, float("nan"), scale)


@triton.jit
def store_scale(scale, scale_ptrs, keep):
    """As four bytes: rows begin anywhere."""
    byte = tl.arange(0, 4)[None, :]
    bits = scale.to(tl.uint32, bitcast=True)[:, None] >> (8 * byte).to(tl.uint32)
    tl.store(scale_ptrs[:, None] + byte, (bits & 0xFF).to(tl.uint8), mask=keep[:, None])


@triton.jit
def store_scales(k_scale, v_scale, scale_ptrs, keep, ALIGNED: tl.constexpr):
    """Scales [HEADS] of K and of V, behind each other."""
    if ALIGNED:
        ptrs = scale_ptrs.to(tl.pointer_type(tl.float32))[:, None] + tl.arange(0, 2)[None, :]
        tl.store(ptrs, tl.join(k_scale, v_scale), mask=keep[:, None])
    else:
        store_scale(k_scale, scale_ptrs, keep)
        store_scale(v_scale, scale_ptrs + 4, keep)


@triton.jit
def divided(x, scale):
    """Rows [HEADS, BLOCK] float32 by their own scales [HEADS] of `row_scale`: to nearest, as a division would.

    Newton's steps from a reciprocal of the row. Powers of two keep what they take in the normal range; a quotient
    that leaves it is 0 as a code. The minus signs are where they keep the sign of a zero.
    """
    exponent = tl.minimum((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF, 253)
    power = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    divisor = scale * power
    inverse = tl.div_rn(tl.full(scale.shape, -1.0, tl.float32), divisor)[:, None]
    divisor = tl.where(divisor == float("inf"), 0.0, divisor)[
        :, None
    ]  # quotients are 0, or NaN of infinities
    negative = x * (-power)[:, None]
    y = negative * inverse
    y = tl.fma(tl.fma(y, divisor, negative), inverse, y)
    return tl.fma(tl.fma(y, divisor, negative), inverse, y)


@triton.jit
def store_encoded(
    x,
    scale,
    ptrs,
    mask,
    CODES: tl.constexpr,
    LARGEST: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Rows [HEADS, BLOCK] float32 by scales [HEADS]; ROW_SCALES: of the rows themselves."""
    y = divided(x, scale) if ROW_SCALES and NATIVE else tl.div_rn(x, tl.zeros_like(x) + scale[:, None])
    tl.store(ptrs, encoded(y, CODES, LARGEST, NATIVE), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def encode_kernel(
    k_ptr, v_ptr, cache_ptr, slots_ptr, scales_ptr, stride_kt, stride_kg, stride_vt, stride_vg,
    stride_n: tl.constexpr, stride_g: tl.constexpr, stride_b: tl.constexpr, num_slots, NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CODES: tl.constexpr, LARGEST: tl.constexpr, ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row_ptrs, is_slot = slot_row(
        cache_ptr, slots_ptr, token, head, stride_n, stride_g, stride_b, num_slots, BLOCK_SIZE
    )
    keep = is_slot & (head < NUM_HEADS)
    k, k_column, k_mask = load_rows(k_ptr, stride_kt, stride_kg, token, head, D, BLOCK_D, NUM_HEADS)
    v, v_column, v_mask = load_rows(v_ptr, stride_vt, stride_vg, token, head, DV, BLOCK_DV, NUM_HEADS)
    k, v = k.to(tl.float32), v.to(tl.float32)
    ROW_SCALES: tl.constexpr = scales_ptr is None
    if ROW_SCALES:
        k_scale, v_scale = row_scale(k, LARGEST), row_scale(v, LARGEST)
        store_scales(k_scale, v_scale, row_ptrs + D + DV, keep, ALIGNED)
    else:
        k_scale = tl.load(scales_ptr + head, mask=head < NUM_HEADS, other=1.0)
        v_scale = tl.load(scales_ptr + NUM_HEADS + head, mask=head < NUM_HEADS, other=1.0)
    k_ptrs, v_ptrs = row_ptrs[:, None] + k_column, row_ptrs[:, None] + D + v_column
    store_encoded(k, k_scale, k_ptrs, k_mask & is_slot, CODES, LARGEST, ROW_SCALES, NATIVE)
    store_encoded(v, v_scale, v_ptrs, v_mask & is_slot, CODES, LARGEST, ROW_SCALES, NATIVE)


def kv_cache_write(k, v, kv_cache, slot_mapping) -> None:
    """See `kv_cache_write_reference`."""
    check_write(k, v, kv_cache, slot_mapping)
    if k.shape[0]:
        grid, operands, numbers, sizes = _launch(k, v, kv_cache, slot_mapping)
        copy_kernel[grid](*operands, *numbers, **sizes)


def check_quantized_write(k, v, kv_cache, slot_mapping, scales, codes) -> None:
    """`check_write` for a cache of codes, whose format is checked, too."""
    check_format(codes, scales, k.shape[1])
    check_cache(kv_cache, k.shape[2] + v.shape[2], scales)
    values = k.new_empty(
        (*kv_cache.shape[:3], k.shape[2] + v.shape[2]), device="meta"
    )  # what the codes stand for
    check_write(k, v, values, slot_mapping)


def quantized_kv_cache_write(k, v, kv_cache, slot_mapping, scales=None, *, codes) -> None:
    """See `quantized_kv_cache_write_reference`."""
    check_quantized_write(k, v, kv_cache, slot_mapping, scales, codes)
    if k.shape[0]:
        grid, operands, numbers, sizes = _launch(k, v, kv_cache, slot_mapping)
        encode_kernel[grid](*operands, scales, *numbers, **sizes, **code_facts(kv_cache, k, v, codes))


def code_facts(kv_cache, k, v, codes) -> dict:
    """What kernels that encode are told of codes; ALIGNED: whether the float32 behind every row can be written as
    such."""
    numbers = (kv_cache.data_ptr(), k.shape[2] + v.shape[2], *kv_cache.stride()[:3])
    facts = {"CODES": codes, "LARGEST": LARGEST_CODE[codes], "ALIGNED": all(n % 4 == 0 for n in numbers)}
    return facts | {"NATIVE": has_fp8(kv_cache.device)}


def _launch(k, v, kv_cache, slot_mapping):
    """(grid, tensors, strides and the number of slots, sizes that are constants of the kernel)."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    num_tokens, num_heads, width = k.shape
    blocks = [max(1, triton.next_power_of_2(x.shape[2])) for x in (k, v)]
    heads = triton.next_power_of_2(min(num_heads, max(1, TILE_VALUES // sum(blocks))))
    sizes = {
        "NUM_HEADS": num_heads, "HEADS": heads, "D": width, "DV": v.shape[2], "BLOCK_D": blocks[0],
        "BLOCK_DV": blocks[1], "BLOCK_SIZE": kv_cache.shape[2],
    }  # fmt: skip
    strides = (*k.stride()[:2], *v.stride()[:2], *kv_cache.stride()[:3])
    numbers = (*strides, kv_cache.shape[0] * kv_cache.shape[2])
    return (num_tokens, triton.cdiv(num_heads, heads)), (k, v, kv_cache, slot_mapping), numbers, sizes
