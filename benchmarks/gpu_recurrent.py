"""What `gpu.py` measures of recurrences over paged states, in the sizes of one layer of known models.

Bytes are those that must move: the states of requests, read and written once each, and every operand and result. Of a
prompt they are few beside the time of a chain of tokens, which is what `us_per_token` says.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpu_cases import op
from gpu_isolated import Case
from gpu_timing import bandwidth_row, num_copies

BLOCK_SIZE = 256
STEPS = ((1, 1), (64, 1), (256, 1), (1, 8192), (8, 1024))  # requests, new tokens of each
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def qwen3_next_conv(tokens: int):
    """(op, operands in front of the cache, shape of a state, options)"""
    x, weight = torch.randn(tokens, 8192, **BF16), torch.randn(8192, 4, **BF16)
    return "paged_short_conv", (x, weight, None), (8192, 3), {"activation": "silu"}


def qwen3_next_delta_rule(tokens: int):
    q, k = torch.randn(2, tokens, 16, 128, **BF16).unbind(0)
    v, beta = torch.randn(tokens, 32, 128, **BF16), torch.rand(tokens, 32, **BF16)
    options = {"scale": 128**-0.5, "l2norm_eps": 1e-6}
    operands = (q, k, v, -torch.rand(tokens, 32, device="cuda"), beta)
    return "paged_gated_delta_rule", operands, (32, 128, 128), options


def mamba2_ssd(tokens: int):
    x, dt = torch.randn(tokens, 128, 64, **BF16), torch.randn(tokens, 128, **BF16)
    b, c = torch.randn(2, tokens, 8, 128, **BF16).unbind(0)
    rate, weight = -torch.rand(128, device="cuda"), torch.rand(128, device="cuda")
    return "paged_ssd", (x, dt, rate, b, c, weight, weight), (128, 64, 128), {"dt_softplus": True}


def mamba_selective_scan(tokens: int):
    x, dt = torch.randn(2, tokens, 8192, **BF16).unbind(0)
    b, c = torch.randn(2, tokens, 16, **BF16).unbind(0)
    rate, weight = -torch.rand(8192, 16, device="cuda"), torch.rand(8192, device="cuda")
    return "paged_selective_scan", (x, dt, b, c, rate, weight, weight), (8192, 16), {"dt_softplus": True}


def xlstm_mlstm(tokens: int):
    q, k = torch.randn(2, tokens, 8, 256, **BF16).unbind(0)
    v, gates = torch.randn(tokens, 8, 512, **BF16), torch.randn(2, tokens, 8, **BF16).unbind(0)
    return "paged_mlstm", (q, k, v, *gates), (8, 257, 513), {"scale": 256**-0.5, "eps": 1e-6}


def recurrence(copy_gb_per_s: float, layer: Callable, requests: int, new: int) -> dict:
    """A step that goes on in states of its own; several sets of them where one would stay in the cache."""
    name, operands, state, options = layer(requests * new)
    dtype = operands[0].dtype if name == "paged_short_conv" else torch.float32
    blocks = torch.arange(1, 1 + 2 * requests, dtype=torch.int32, device="cuda").view(requests, 2)
    columns = -(-(BLOCK_SIZE + new) // BLOCK_SIZE)
    table = torch.zeros(requests, columns, dtype=torch.int32, device="cuda")
    table[:, 0], table[:, -1] = blocks.unbind(1)
    lens = torch.full((requests,), BLOCK_SIZE + new, dtype=torch.int32, device="cuda")
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * new
    metadata, options = (table, lens, starts), {"block_size": BLOCK_SIZE, **options}
    out = op(name)(*operands, _cache(requests, state, dtype), *metadata, **options)
    tensors = [x for x in (*operands, out) if x is not None]
    num_bytes = 2 * requests * torch.Size(state).numel() * dtype.itemsize + sum(x.nbytes for x in tensors)
    calls = []
    for _ in range(num_copies(num_bytes)):
        given = (*operands, _cache(requests, state, dtype), *metadata)
        calls.append(lambda g=given: op(name)(*g, **options))
    row = bandwidth_row(layer.__name__, num_bytes, calls, copy_gb_per_s, requests=requests, new=new)
    return {**row, "us_per_token": row["ms"] * 1e3 / new}


def _cache(requests: int, state: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return 0.1 * torch.randn(1 + 2 * requests, *state, dtype=dtype, device="cuda")


LAYERS = (qwen3_next_conv, qwen3_next_delta_rule, mamba2_ssd, mamba_selective_scan, xlstm_mlstm)


def cases(copy_gb_per_s: float) -> list[Case]:
    return [
        (f"{layer.__name__} {step}", lambda a=layer, s=step: [recurrence(copy_gb_per_s, a, *s)])
        for layer in LAYERS
        for step in STEPS
    ]
