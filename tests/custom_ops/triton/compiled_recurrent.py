"""Launches of the recurrences over paged states, for `compiled_for`: the sizes of one layer of known models."""

from __future__ import annotations

import torch

from pagebinder.custom_ops.triton import channel_scans, delta_rule, mlstm, selective_scan, short_conv, ssd

BLOCK_SIZE = 256


def step(requests: int, *state, dtype=torch.float32) -> tuple:
    """(cache, block table, lengths, starts): nothing is computed, so they may hold anything."""
    cache = torch.empty(4, *state, dtype=dtype)
    return cache, *(torch.empty(*n).int() for n in ((requests, 64), (requests,), (requests + 1,)))


def convolve(dtype, tokens: int, channels: int = 8192, taps: int = 4) -> None:
    x, weight = torch.empty(tokens, channels, dtype=dtype), torch.empty(channels, taps, dtype=dtype)
    options = {"block_size": BLOCK_SIZE, "activation": "silu"}
    short_conv.paged_short_conv(x, weight, None, *step(4, channels, taps - 1, dtype=dtype), **options)


def correct(dtype, tokens: int, row_decay: bool = False, heads: int = 32, width: int = 128) -> None:
    q, v = torch.empty(tokens, heads // 2, width, dtype=dtype), torch.empty(tokens, heads, width, dtype=dtype)
    beta = torch.empty(tokens, heads, dtype=dtype)
    g = torch.empty(tokens, heads, width) if row_decay else torch.empty(tokens, heads)
    options = {"block_size": BLOCK_SIZE, "scale": width**-0.5, "l2norm_eps": 1e-6}
    delta_rule.paged_gated_delta_rule(q, q, v, g, beta, *step(4, heads, width, width), **options)


def scan_heads(dtype, tokens: int, heads: int = 128, groups: int = 8, state: int = 128) -> None:
    x, dt = torch.empty(tokens, heads, 64, dtype=dtype), torch.empty(tokens, heads, dtype=dtype)
    b, rate = torch.empty(tokens, groups, state, dtype=dtype), torch.empty(heads)
    operands = (x, dt, rate, b, b, rate, rate, *step(4, heads, 64, state))
    ssd.paged_ssd(*operands, block_size=BLOCK_SIZE, dt_softplus=True)


def scan_channels(dtype, channels: int = 5120, state: int = 16) -> None:
    x, b = torch.empty(8, channels, dtype=dtype), torch.empty(8, state, dtype=dtype)
    rates, weight = torch.empty(channels, state), torch.empty(channels)
    operands = (x, x, b, b, rates, weight, weight, *step(4, channels, state))
    selective_scan.paged_selective_scan(*operands, block_size=BLOCK_SIZE, dt_softplus=True)
    channel_scans.paged_linear_recurrence(x, x, *step(4, channels), block_size=BLOCK_SIZE)
    channel_scans.paged_wkv(x, x, weight, weight, *step(4, 3, channels), block_size=BLOCK_SIZE)


def remember(dtype, heads: int = 8, width: int = 256, width_v: int = 512) -> None:
    q, v = torch.empty(8, heads, width, dtype=dtype), torch.empty(8, heads, width_v, dtype=dtype)
    gate = torch.empty(8, heads, dtype=dtype)
    options = {"block_size": BLOCK_SIZE, "scale": width**-0.5, "eps": 1e-6}
    mlstm.paged_mlstm(q, q, v, gate, gate, *step(4, heads, width + 1, width_v + 1), **options)


def compile_recurrent(everything: bool) -> None:
    """`everything`: all kernels in all forms, not only those of Qwen3-Next and Mamba-2 in bfloat16."""
    bf16 = torch.bfloat16
    convolve(bf16, tokens=64)
    correct(bf16, tokens=64)
    scan_heads(bf16, tokens=64)
    if everything:
        convolve(bf16, tokens=4)
        correct(bf16, tokens=4)
        scan_heads(bf16, tokens=4)
        scan_channels(bf16)
        remember(bf16)
        convolve(torch.float32, tokens=64)
        for tokens in (4, 64):
            correct(bf16, tokens, width=256)
            correct(torch.float32, tokens, row_decay=True)
            scan_heads(torch.float32, tokens, state=256)
        remember(torch.float32)
