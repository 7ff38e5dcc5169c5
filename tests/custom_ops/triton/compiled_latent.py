"""What `compiled_for` compiles of the kernels over latent rows and streams, in the sizes of DeepSeek-V4 and V3.2."""

from __future__ import annotations

import torch

from pagebinder.custom_ops.latent.layouts import row_layout
from pagebinder.custom_ops.triton import (
    compress,
    hyper,
    indexer,
    inverse_rope_grouped,
    latent,
    norm_rope,
    sparse_mla,
)

HEADS, WIDTH, ROPE = 64, 512, 64


def int32(*shape) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def cache_of(layout: str, dtype, width: int, rope_dim: int, entries: int = 64) -> torch.Tensor:
    if layout == "plain":
        return torch.empty(4, entries, width, dtype=dtype)
    return torch.empty(4, row_layout(layout, width, rope_dim).page_bytes(entries), dtype=torch.uint8)


def attend_sparse(dtype, layout: str, tokens: int, topk: int | None = 512) -> None:
    """A few tokens, whose rows are split, or many; a window and listed or all entries."""
    q, cache = torch.empty(tokens, HEADS, WIDTH, dtype=dtype), cache_of(layout, dtype, WIDTH, ROPE)
    table, indices = int32(4, 64), None if topk is None else int32(tokens, topk)
    sparse_mla.sparse_mla_attention(
        q, cache, table, cache, table, indices, int32(4), int32(5), torch.empty(HEADS), scale=0.1, window=128,
        ratio=4, head_dim_v=WIDTH, layout=layout, rope_dim=0 if layout == "plain" else ROPE,
    )  # fmt: skip


def attend_listed_latents(
    dtype, layout: str = "fp8_v32", tokens: int = 512, heads: int = 128, sinks: torch.Tensor | None = None
) -> None:
    """DeepSeek-V3.2, and HYV4 with sinks: values without what is rotated."""
    q, cache = torch.empty(tokens, heads, 576, dtype=dtype), cache_of(layout, dtype, 576, 64)
    sparse_mla.sparse_mla_attention(
        q, None, None, cache, int32(4, 64), int32(tokens, 2048), int32(4), int32(5), sinks, scale=0.1, window=0,
        ratio=1, head_dim_v=512, layout=layout, rope_dim=0 if layout == "plain" else 64,
    )  # fmt: skip


def attend_to_pools(dtype, tokens: int, heads: int = 64, ratio: int = 16) -> None:
    """GLM-5.3: groups of latents without RoPE."""
    q, w = torch.empty(tokens, heads, 256, dtype=dtype), torch.empty(heads, 256, 512, dtype=dtype)
    starts = torch.arange(tokens + 1).int()
    step = (torch.zeros(tokens, 64).int(), torch.full((tokens,), 100).int(), starts)
    operands = (
        q,
        q[..., :0],
        w,
        w,
        cache_of("plain", dtype, 512, 0),
        *step,
        torch.zeros(tokens, 2048 // ratio).int(),
    )
    latent.paged_mla_attention(*operands, scale=0.1, ratio=ratio)


def score(dtype, layout: str, tokens: int) -> None:
    q, weights = torch.empty(tokens, HEADS, 128, dtype=dtype), torch.empty(tokens, HEADS)
    cache, step = cache_of(layout, dtype, 128, 0), (int32(4, 4096), int32(4), int32(5))
    indexer.indexer_score_topk(q, weights, cache, *step, topk=512, ratio=4, scale=0.1, layout=layout)


def compress_tokens(
    dtype, layout: str, ratio: int, width: int, rope_dim: int = 0, normed: bool = True
) -> None:
    c = 2 if ratio == 4 else 1
    kv, weights = torch.empty(64, c * width, dtype=dtype), torch.empty(ratio, c * width)
    states = torch.empty(4, c, 3, width)
    compress.compress_norm_rope_store(
        kv, kv, weights, weights[0, :width].to(dtype) if normed else None, torch.empty(32 if normed else 0), states,
        int32(4, 64), cache_of(layout, dtype, width, rope_dim), int32(4, 64), int32(4), int32(5), ratio=ratio,
        overlap=c == 2, eps=1e-6, rope_scale=1.0, block_size=64, layout=layout, rope_dim=rope_dim,
    )  # fmt: skip


def turn(dtype, tokens: int = 64) -> None:
    """Queries, rows to be stored, and what attention gives."""
    q, cos = torch.empty(tokens, HEADS, WIDTH, dtype=dtype), torch.empty(tokens, 32)
    norm_rope.q_norm_rope(q, cos, cos, eps=1e-6)
    cache = cache_of("fp8_v4", dtype, WIDTH, ROPE)
    norm_rope.kv_rope_quant_store(q[:, 0], cos, cos, cache, int32(tokens), layout="fp8_v4", rope_dim=ROPE)
    weight = torch.empty(8 * 16, 8 * WIDTH, dtype=dtype)
    inverse_rope_grouped.inverse_rope_grouped_linear(q, cos, cos, weight, groups=8, fp8=True)


def connect(dtype, tokens: int = 64, streams: int = 4, width: int = 4096) -> None:
    x, update = torch.empty(tokens, streams, width, dtype=dtype), torch.empty(tokens, width, dtype=dtype)
    rows = (2 + streams) * streams
    weights = (torch.empty(rows, streams * width), torch.empty(rows), torch.empty(3))
    post, comb, _ = hyper.hyper_connection(x, *weights, sinkhorn_iters=20, norm_eps=1e-6, eps=1e-6)
    hyper.hyper_mix(x, post, comb, update)


def compile_latent(every: bool) -> None:
    dtype = torch.bfloat16
    attend_sparse(dtype, "fp8_v4", 4)
    attend_listed_latents(dtype)
    score(dtype, "fp8_index", 4)
    compress_tokens(dtype, "fp8_v4", 4, WIDTH, ROPE)
    turn(dtype)
    connect(dtype)
    if not every:
        return
    for layout in ("plain", "fp8_v4"):
        attend_sparse(dtype, layout, 512)
        attend_sparse(dtype, layout, 4, topk=None)
    attend_sparse(torch.float32, "plain", 4)
    attend_sparse(torch.float16, "fp8_v4", 512)
    attend_listed_latents(dtype, "plain")
    for tokens in (4, 512):
        attend_listed_latents(dtype, "plain", tokens, sinks=torch.empty(128))
        attend_to_pools(dtype, tokens)
    for layout in ("plain", "fp4_index"):
        score(dtype, layout, 4)
        score(dtype, layout, 512)
    score(torch.float32, "plain", 4)
    compress_tokens(dtype, "plain", 128, WIDTH)
    compress_tokens(dtype, "fp8_index", 4, 128)
    compress_tokens(dtype, "fp4_index", 4, 128)
    compress_tokens(dtype, "plain", 16, 128, normed=False)
    for other in (torch.float32, torch.float16):
        turn(other)
        connect(other)
