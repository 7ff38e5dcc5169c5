"""What `gpu.py` measures of attention beside that of a Llama: wide heads, encoders, a bias by distance."""

from __future__ import annotations

import torch
from gpu_cases import decode, op
from gpu_isolated import Case
from gpu_timing import median_ms
from torch.nn.functional import scaled_dot_product_attention as sdpa

WIDE = (512, 576)  # channels of a head
WIDE_HEADS = (16, 2)  # of queries, of K and V
ENCODER_HEADS, ENCODER_WIDTH = 16, 64  # of a large BERT or T5
NUM_BEHIND = 127


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


def cases(copy_gb_per_s: float) -> list[Case]:
    names = ("packed_attention", "packed_relative_attention")
    wide = [
        (f"decode, heads of {w}", lambda w=w: [decode(copy_gb_per_s, 16, 8192, heads=(*WIDE_HEADS, w))])
        for w in WIDE
    ]
    return [*wide, *((name, lambda n=name: [encoder(n)]) for name in names)]
