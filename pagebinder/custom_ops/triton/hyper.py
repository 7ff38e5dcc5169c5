"""`pagebinder_triton::hyper_connection`, `hyper_mix` and `hyper_head`: a residual of several streams.

    logits_kernel     grid [token tiles, splits]    X fn^T and the sum of X^2 over a part of the channels
    collapse_kernel   grid [T]                      parts summed; sigmoids, Sinkhorn-Knopp; sum of pre_i X_i
    mix_kernel        grid [T, channel tiles]       post_k * update + sum_j comb[j, k] X_j, rounded as elsewhere

Few tokens read the weights of the logits once altogether, in parts on all multiprocessors, so a decode takes the time
of those bytes. Errors in the logits act on all layers that follow, so products are those of float32: of float32
streams as such, of 16-bit ones by tensor cores on TF32 parts of a weight, which leave out what lies 22 bits below,
and BLOCK_K channels at a time, because tensor cores truncate their sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.hyper.hyper import check_connection, check_head, check_mix
from pagebinder.custom_ops.triton.attention_kernels import nonzero
from pagebinder.custom_ops.triton.gpu import multiprocessors, round_splits
from pagebinder.custom_ops.triton.paged_attention import padded
from pagebinder.custom_ops.triton.values import SIZES, rounded, through

TILE_TOKENS, MANY_TOKENS = 16, 2048
TILE_OF_MANY = 64  # from so many tokens on that such tiles fill a GPU
BLOCK_K = 64
ROWS_OF_STAGES = 128  # of more, sums take the registers of more warps, and `fn` all shared memory
MIN_CHANNELS_OF_SPLIT = 512
MAX_SPLITS = 32
TILE_CHANNELS = 1024


@triton.jit(do_not_specialize=SIZES)
def logits_kernel(
    x_ptr, fn_ptr, part_ptr, square_ptr, stride_f, num_tokens, channels_of_split, K: tl.constexpr, M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """part [splits, T, M], square [splits, T]; x [T, K] contiguous, fn [M, K]."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    row = tl.arange(0, BLOCK_M)
    of_split = channels_of_split // BLOCK_K * BLOCK_K  # as it is: so the compiler knows that rows are aligned
    begin = tl.program_id(1) * of_split
    end = tl.minimum(begin + of_split, K)
    acc = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    square = tl.zeros((BLOCK_T,), tl.float32)
    for k in range(begin, end, BLOCK_K):
        channel = k + tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + token.to(tl.int64)[:, None] * K + channel[None, :]
        x = tl.load(x_ptrs, mask=is_token[:, None] & (channel < end)[None, :], other=0).to(tl.float32)
        fn_ptrs = fn_ptr + row[:, None] * stride_f + channel[None, :]
        fn = tl.load(fn_ptrs, mask=(row < M)[:, None] & (channel < end)[None, :], other=0).to(tl.float32)
        part = tl.dot(x, tl.trans(fn), input_precision=PRECISION)
        acc = tl.fma(
            part, tl.full(part.shape, 1.0, tl.float32), acc
        )  # a sum would become the product's own again
        square += tl.sum(x * x, 1)
    part_row = tl.program_id(1) * num_tokens + token
    tl.store(
        part_ptr + part_row[:, None] * M + row[None, :], acc, mask=is_token[:, None] & (row < M)[None, :]
    )
    tl.store(square_ptr + part_row, square, mask=is_token)


@triton.jit
def logit(part_ptr, at, mask, factor, scale_ptr, base_ptr, num_tokens, NUMBER: tl.constexpr, M: tl.constexpr,
          SPLITS: tl.constexpr):  # fmt: skip
    """Scaled and shifted logits number `at` of a token; NUMBER: which of the scales."""
    x = tl.zeros(at.shape, tl.float32)
    for split in range(SPLITS):
        x += tl.load(part_ptr + split * num_tokens * M + at, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + NUMBER).to(tl.float32)
    return x * factor * scale + tl.load(base_ptr + at, mask=mask, other=0).to(tl.float32)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=SIZES)
def collapse_kernel(
    x_ptr, part_ptr, square_ptr, base_ptr, scale_ptr, post_ptr, comb_ptr, out_ptr, num_tokens, norm_eps, eps,
    S: tl.constexpr, C: tl.constexpr, M: tl.constexpr, SPLITS: tl.constexpr, ITERATIONS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """ITERATIONS: of Sinkhorn-Knopp; 0 in the head, which has no post and comb."""
    token = tl.program_id(0)
    total = 0.0
    for split in range(SPLITS):
        total += tl.load(square_ptr + split * num_tokens + token)
    factor = tl.rsqrt(total / (S * C) + norm_eps)
    part_ptr += token * M
    i = tl.arange(0, BLOCK_S)
    is_stream = i < S
    pre = sigmoid(logit(part_ptr, i, is_stream, factor, scale_ptr, base_ptr, num_tokens, 0, M, SPLITS)) + eps
    pre = tl.where(is_stream, pre, 0.0)
    if ITERATIONS > 0:
        post = logit(part_ptr, S + i, is_stream, factor, scale_ptr, base_ptr, num_tokens, 1, M, SPLITS)
        tl.store(post_ptr + token * S + i, 2 * sigmoid(post), mask=is_stream)
        at = i[:, None] * S + i[None, :]
        exists = is_stream[:, None] & is_stream[None, :]
        z = logit(part_ptr, 2 * S + at, exists, factor, scale_ptr, base_ptr, num_tokens, 2, M, SPLITS)
        z = tl.where(exists, z, float("-inf"))
        e = tl.exp(z - tl.max(tl.where(is_stream[:, None], z, 0.0), 1)[:, None])
        comb = tl.where(exists, e / nonzero(tl.sum(e, 1))[:, None] + eps, 0.0)
        comb = tl.where(exists, comb / (tl.sum(comb, 0)[None, :] + eps), 0.0)
        for _ in range(ITERATIONS - 1):
            comb = tl.where(exists, comb / (tl.sum(comb, 1)[:, None] + eps), 0.0)
            comb = tl.where(exists, comb / (tl.sum(comb, 0)[None, :] + eps), 0.0)
        tl.store(comb_ptr + token * S * S + at, comb, mask=exists)
    x_ptr += token.to(tl.int64) * (S * C)
    for c in range(0, C, BLOCK_C):
        channel = c + tl.arange(0, BLOCK_C)
        mask = is_stream[:, None] & (channel < C)[None, :]
        x = tl.load(x_ptr + i[:, None] * C + channel[None, :], mask=mask, other=0).to(tl.float32)
        y = rounded(tl.sum(x * pre[:, None], 0), out_ptr.dtype.element_ty)
        tl.store(out_ptr + token.to(tl.int64) * C + channel, y, mask=channel < C)


@triton.jit
def mix_kernel(
    x_ptr, post_ptr, comb_ptr, update_ptr, out_ptr, stride_t, stride_s, stride_u, S: tl.constexpr, C: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    i = tl.arange(0, BLOCK_S)
    mask = (i < S)[:, None] & (channel < C)[None, :]
    x_ptrs = x_ptr + token * stride_t + i.to(tl.int64)[:, None] * stride_s + channel[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0).to(tl.float32)
    update = tl.load(update_ptr + token * stride_u + channel, mask=channel < C, other=0).to(tl.float32)
    for k in tl.static_range(S):
        comb = tl.load(comb_ptr + token * S * S + i * S + k, mask=i < S, other=0).to(tl.float32)
        kept = tl.sum(x * through(comb, dtype)[:, None], 0)
        post = tl.load(post_ptr + token * S + k).to(tl.float32)
        y = through(through(post, dtype) * update, dtype) + through(kept, dtype)
        tl.store(out_ptr + (token * S + k) * C + channel, rounded(y, dtype), mask=channel < C)


def hyper_connection(streams, fn, base, scale, *, sinkhorn_iters, norm_eps, eps):
    """See `hyper_connection_reference`."""
    check_connection(streams, fn, base, scale, sinkhorn_iters)
    num_tokens, num_streams, _ = streams.shape
    post = torch.empty((num_tokens, num_streams), dtype=torch.float32, device=streams.device)
    comb = torch.empty((num_tokens, num_streams, num_streams), dtype=torch.float32, device=streams.device)
    out = _collapsed(streams, fn, base, scale, post, comb, sinkhorn_iters, norm_eps, eps)
    return post, comb, out


def hyper_head(streams, fn, base, scale, *, norm_eps, eps):
    """See `hyper_head_reference`."""
    check_head(streams, fn, base, scale)
    return _collapsed(streams, fn, base, scale, None, None, 0, norm_eps, eps)


def _collapsed(streams, fn, base, scale, post, comb, iterations, norm_eps, eps) -> torch.Tensor:
    num_tokens, num_streams, width = streams.shape
    out = torch.empty((num_tokens, width), dtype=streams.dtype, device=streams.device)
    if out.numel() == 0:
        return out
    streams, base, scale = (x.contiguous() for x in (streams, base, scale))
    fn = fn if fn.stride(1) == 1 else fn.contiguous()
    channels, rows = num_streams * width, len(fn)
    tile = TILE_TOKENS if num_tokens < MANY_TOKENS or rows > ROWS_OF_STAGES else TILE_OF_MANY
    tiles = triton.cdiv(num_tokens, tile)
    wanted = min(2 * multiprocessors(streams.device) // tiles, channels // MIN_CHANNELS_OF_SPLIT, MAX_SPLITS)
    of_split = triton.cdiv(triton.cdiv(channels, round_splits(max(1, wanted))), BLOCK_K) * BLOCK_K
    splits = triton.cdiv(channels, of_split)
    parts = torch.empty((splits, num_tokens, rows), dtype=torch.float32, device=streams.device)
    squares = torch.empty((splits, num_tokens), dtype=torch.float32, device=streams.device)
    logits_kernel[tiles, splits](
        streams, fn, parts, squares, fn.stride(0), num_tokens, of_split, K=channels, M=rows, BLOCK_M=padded(rows),
        BLOCK_T=tile, BLOCK_K=BLOCK_K, PRECISION="ieee" if streams.dtype == torch.float32 else "tf32x3",
        num_warps=4 if rows <= ROWS_OF_STAGES else 16, num_stages=3 if rows <= ROWS_OF_STAGES else 1,
    )  # fmt: skip
    collapse_kernel[(num_tokens,)](
        streams, parts, squares, base, scale, post, comb, out, num_tokens, norm_eps, eps, S=num_streams, C=width,
        M=rows, SPLITS=splits, ITERATIONS=iterations, num_warps=4, **_blocks(num_streams, width),
    )  # fmt: skip
    return out


def hyper_mix(streams, post, comb, update):
    """See `hyper_mix_reference`."""
    check_mix(streams, post, comb, update)
    num_tokens, num_streams, width = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if out.numel() == 0:
        return out
    streams, update = (x if x.stride(-1) == 1 else x.contiguous() for x in (streams, update))
    blocks = _blocks(num_streams, width)
    mix_kernel[num_tokens, triton.cdiv(width, blocks["BLOCK_C"])](
        streams, post.contiguous(), comb.contiguous(), update, out, *streams.stride()[:2], update.stride(0),
        S=num_streams, C=width, **blocks, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _blocks(num_streams: int, width: int) -> dict[str, int]:
    block = triton.next_power_of_2(num_streams)
    channels = max(16, 4 * TILE_CHANNELS // block)
    return {"BLOCK_S": block, "BLOCK_C": min(channels, triton.next_power_of_2(width))}
