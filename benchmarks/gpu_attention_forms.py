"""What `gpu.py` measures of attention beside that of a Llama: other widths, MLA, encoders, a bias by distance."""

from __future__ import annotations

import torch
from gpu_cases import BLOCK_SIZE, decode, op
from gpu_isolated import Case
from gpu_timing import bandwidth_row, median_ms, num_copies
from torch.nn.functional import scaled_dot_product_attention as sdpa

WIDTHS = {
    64: (32, 8),
    256: (16, 4),
    512: (16, 2),
    576: (16, 2),
}  # channels of a head: heads of queries, of K and V
MLA_HEADS, NOPE, ROPE, LATENT = 128, 128, 64, 512  # DeepSeek-V3
MLA = ((16, 8192), (64, 4096))  # requests, context
ENCODER_HEADS, ENCODER_WIDTH = 16, 64  # of a large BERT or T5
NUM_BEHIND = 127
INKLING_HEADS, EXTENT = (64, 8, 128), 1024  # of queries, of K and V, channels; how far back there is a bias
BY_QUERY = ((32, 1, 8192), (1, 2048, 0))  # requests, new tokens of each, context


def mla(copy_gb_per_s: float, requests: int, context: int) -> dict:
    """One new token a request over latent rows, each read once; with the products by w_k and w_v."""
    q_nope, q_rope = (
        torch.randn(requests, MLA_HEADS, n, dtype=torch.bfloat16, device="cuda") for n in (NOPE, ROPE)
    )
    w_k, w_v = (torch.randn(MLA_HEADS, n, LATENT, dtype=torch.bfloat16, device="cuda") for n in (NOPE, NOPE))
    blocks = context // BLOCK_SIZE
    lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    num_bytes = requests * context * 2 * (LATENT + ROPE)
    calls = []
    for _ in range(num_copies(num_bytes)):
        shape = (requests * blocks, BLOCK_SIZE, LATENT + ROPE)
        cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        table = torch.randperm(requests * blocks, device="cuda").int().view(requests, blocks)
        operands = (q_nope, q_rope, w_k, w_v, cache, table, lens, starts)
        calls.append(lambda o=operands: op("paged_mla_attention")(*o, scale=(NOPE + ROPE) ** -0.5))
    row = bandwidth_row("MLA decode", num_bytes, calls, copy_gb_per_s, requests=requests, context=context)
    flops = 2 * requests * context * MLA_HEADS * (2 * LATENT + ROPE)
    return {**row, "tflop_per_s": flops / row["ms"] / 1e9}


def encoder(name: str, requests: int = 32, tokens: int = 512) -> dict:
    """Whole sequences, every token sees all: ours on packed rows, torch's on a batch of one length."""
    shape = (requests * tokens, ENCODER_HEADS, ENCODER_WIDTH)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * tokens
    options, mask = {"scale": ENCODER_WIDTH**-0.5, "causal": False}, None
    operands = (q, k, v, starts)
    if name == "packed_relative_attention":
        bias = torch.randn(ENCODER_HEADS, 2 * NUM_BEHIND + 1, dtype=torch.bfloat16, device="cuda")
        operands, options = (*operands, bias), {**options, "num_behind": NUM_BEHIND}
        at = torch.arange(tokens, device="cuda")
        mask = bias[:, (at[None] - at[:, None] + NUM_BEHIND).clamp(0, 2 * NUM_BEHIND)]
    ms = median_ms([lambda: op(name)(*operands, **options)])
    batch = [x.view(requests, tokens, ENCODER_HEADS, ENCODER_WIDTH).transpose(1, 2) for x in (q, k, v)]
    torch_ms = median_ms([lambda: sdpa(*batch, attn_mask=mask)])
    flops = 4 * requests * ENCODER_HEADS * ENCODER_WIDTH * tokens**2
    return {
        "case": name, "requests": requests, "tokens": tokens, "ms": ms, "tflop_per_s": flops / ms / 1e9,
        "times_as_fast_as_sdpa": torch_ms / ms,
    }  # fmt: skip


def by_query(requests: int, new: int, context: int) -> dict:
    """A bias of every query's own over pages, beside the same attention without one."""
    heads, kv_heads, width = INKLING_HEADS
    blocks = -(-(context + new) // BLOCK_SIZE)
    shapes = (requests * new, heads, width), (requests * blocks, kv_heads, BLOCK_SIZE, 2 * width)
    q, cache = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    table = torch.randperm(requests * blocks, device="cuda").int().view(requests, blocks)
    lens = torch.full((requests,), context + new, dtype=torch.int32, device="cuda")
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * new
    bias = torch.randn(len(q), heads, EXTENT + 1, dtype=torch.bfloat16, device="cuda")
    operands, options = (q, cache, table, lens, starts), {"head_dim_v": width, "scale": 1 / width}
    relative = {**options, "num_behind": EXTENT}
    ms = median_ms([lambda: op("paged_relative_attention")(*operands, bias, **relative)])
    plain_ms = median_ms([lambda: op("paged_attention")(*operands, **options)])
    return {
        "case": "a bias by query", "requests": requests, "new_tokens": new, "context": context, "ms": ms,
        "times_as_long_as_without": ms / plain_ms,
    }  # fmt: skip


def cases(copy_gb_per_s: float) -> list[Case]:
    names = ("packed_attention", "packed_relative_attention")
    wide = [
        (f"decode, heads of {w}", lambda w=w, h=heads: [decode(copy_gb_per_s, 16, 8192, heads=(*h, w))])
        for w, heads in WIDTHS.items()
    ]
    latent = [(f"MLA decode {shape}", lambda s=shape: [mla(copy_gb_per_s, *s)]) for shape in MLA]
    inkling = [(f"a bias by query {i}", lambda c=case: [by_query(*c)]) for i, case in enumerate(BY_QUERY)]
    return [*wide, *latent, *((name, lambda n=name: [encoder(n)]) for name in names), *inkling]
