"""Token-by-token oracles of the recurrences in float64, random operands, and batches of requests to page them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

import pagebinder.custom_ops  # noqa: F401  (registers the ops)

OPS = torch.ops.pagebinder


@dataclass(frozen=True)
class Recurrence:
    """One op with operands: `tokens` [T, ...] in front of `weights`, in the order of `order`.

    oracle(state, tokens, weights) -> (out [T, ...], states after each token), in float64.
    """

    semantic: Callable
    paged: Callable
    options: dict
    state_shape: tuple[int, ...]
    state_dtype: torch.dtype
    tokens: Callable
    weights: tuple
    order: tuple[int, ...]
    oracle: Callable

    def operands(self, tokens) -> tuple:
        both = (*tokens, *self.weights)
        return tuple(both[i] for i in self.order)

    def run(self, tokens) -> torch.Tensor:
        return self.semantic(*self.operands(tokens), **self.options)

    def run_paged(self, tokens, cache, table, lens, starts, block_size) -> torch.Tensor:
        return self.paged(
            *self.operands(tokens), cache, table, lens, starts, block_size=block_size, **self.options
        )


def randn(generator, *shape):
    return torch.randn(shape, generator=generator)


def short_conv(activation="silu", bias=True, dtype=torch.float32, channels=6, taps=4) -> Recurrence:
    generator = torch.Generator().manual_seed(1)
    weight = randn(generator, channels, taps).to(dtype)
    bias = randn(generator, channels).to(dtype) if bias else None

    def oracle(state, tokens, weights):
        weight, bias = weights
        outs, states = [], []
        for x in tokens[0].double():
            window = torch.cat([state, x[:, None]], dim=1)
            y = (window * weight.double()).sum(1) + (0 if bias is None else bias.double())
            outs.append(F.silu(y) if activation else y)
            state = window[:, 1:]
            states.append(state)
        return torch.stack(outs), torch.stack(states)

    return Recurrence(
        OPS.short_conv, OPS.paged_short_conv, {"activation": activation}, (channels, taps - 1), dtype,
        lambda t, g: (randn(g, t, channels).to(dtype),), (weight, bias), (0, 1, 2), oracle,
    )  # fmt: skip


def gated_delta_rule(norm=True, dtype=torch.float32, group=2, key_heads=2, width=8, width_v=5) -> Recurrence:
    heads, options = key_heads * group, {"scale": width**-0.5, "l2norm_eps": 1e-6 if norm else None}

    def tokens(t, g):
        q, k = (randn(g, t, key_heads, width) * (1 if norm else width**-0.5) for _ in range(2))
        v = 4 * randn(g, t, heads, width_v)
        decay, beta = -0.1 * randn(g, t, heads).exp(), torch.sigmoid(randn(g, t, heads))
        return (q.to(dtype), k.to(dtype), v.to(dtype), decay, beta.to(dtype))

    def oracle(state, tokens, weights):
        q, k, v, decay, beta = (x.double() for x in tokens)
        q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
        if norm:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        outs, states = [], []
        for t in range(len(q)):
            state = state * decay[t].exp()[:, None, None]
            answer = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - answer))
            outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * width**-0.5)
            states.append(state)
        return torch.stack(outs), torch.stack(states)

    return Recurrence(
        OPS.gated_delta_rule, OPS.paged_gated_delta_rule, options, (heads, width, width_v), torch.float32,
        tokens, (), (0, 1, 2, 3, 4), oracle,
    )  # fmt: skip


def ssd(
    bare=False, dtype=torch.float32, group=2, groups=2, width=5, state=8, limits=(0.0, None)
) -> Recurrence:
    """`bare`: no skip connection, no bias, no softplus."""
    generator = torch.Generator().manual_seed(2)
    heads = group * groups
    A = -0.3 * randn(generator, heads).exp()
    D, bias = (None, None) if bare else (randn(generator, heads), randn(generator, heads) - 1)
    options = {"dt_softplus": not bare, "dt_min": limits[0], "dt_max": limits[1]}

    def tokens(t, g):
        x, dt = randn(g, t, heads, width), randn(g, t, heads)
        B, C = randn(g, t, groups, state), randn(g, t, groups, state)
        return (x.to(dtype), (dt.abs() if bare else dt).to(dtype), B.to(dtype), C.to(dtype))

    def oracle(state, tokens, weights):
        x, dt, B, C = (y.double() for y in tokens)
        B, C = (y.repeat_interleave(group, dim=1) for y in (B, C))
        if not bare:
            dt = F.softplus(dt + bias.double())
        dt = dt.clamp(min=limits[0], max=limits[1])
        outs, states = [], []
        for t in range(len(x)):
            decay = (dt[t] * A.double()).exp()[:, None, None]
            state = decay * state + torch.einsum("h,hp,hn->hpn", dt[t], x[t], B[t])
            y = torch.einsum("hpn,hn->hp", state, C[t])
            outs.append(y if bare else y + D.double()[:, None] * x[t])
            states.append(state)
        return torch.stack(outs), torch.stack(states)

    return Recurrence(
        OPS.ssd, OPS.paged_ssd, options, (heads, width, state), torch.float32,
        tokens, (A, D, bias), (0, 1, 4, 2, 3, 5, 6), oracle,
    )  # fmt: skip


RECURRENCES = {
    "short_conv": short_conv,
    "gated_delta_rule": gated_delta_rule,
    "ssd": ssd,
}


def zero_state(recurrence: Recurrence) -> torch.Tensor:
    return torch.zeros(recurrence.state_shape, dtype=torch.float64)


def strided_cache(recurrence: Recurrence, num_blocks: int) -> torch.Tensor:
    """[N, *state], one block stride apart in a wider arena, every value NaN."""
    size = torch.Size(recurrence.state_shape).numel()
    arena = torch.full((num_blocks, size + 7), float("nan"), dtype=recurrence.state_dtype)
    return arena[:, 3 : 3 + size].unflatten(1, recurrence.state_shape)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bad_operands(cache: torch.Tensor) -> dict[str, dict]:
    """What a paged recurrence says -> operands in place of those of 4 tokens in blocks 1 and 2 of 3, of 8 tokens."""
    return {
        "must be int32": {"lens": torch.tensor([4])},
        "at least as many rows": {"lens": int32(4, 4), "starts": int32(0, 2, 4)},
        "one entry more": {"starts": int32(0, 2, 4)},
        "rise from 0": {"starts": int32(0, 5)},
        "smaller than its new tokens": {"lens": int32(3)},
        "exceeds its block table": {"lens": int32(17)},
        "block_size must be positive": {"block_size": 0},
        "start state is null": {"table": int32(0, 2)[None], "lens": int32(9)},
        "not valid": {"table": int32(3, 2)[None]},
        "the cache of a": {"cache": cache.double()},
    }
