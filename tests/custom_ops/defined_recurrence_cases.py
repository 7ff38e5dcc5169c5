"""Token-by-token oracles in float64 of the ops that `define_recurrence` makes, with random operands."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.custom_ops.recurrent_cases import OPS, Recurrence, randn


def linear_recurrence(dtype=torch.float32, width=6) -> Recurrence:
    """Decays reach 0, as RG-LRU's do at position 0."""

    def tokens(t, g):
        decay = torch.rand(t, width, generator=g)
        return randn(g, t, width).to(dtype), decay.masked_fill(decay < 0.05, 0.0)

    def oracle(state, tokens, weights):
        states = []
        for x, decay in zip(*(y.double() for y in tokens)):
            state = decay * state + x
            states.append(state)
        return torch.stack(states), torch.stack(states)

    return Recurrence(
        OPS.linear_recurrence, OPS.paged_linear_recurrence, {}, (width,), torch.float32,
        tokens, (), (0, 1), oracle,
    )  # fmt: skip


def selective_scan(bare=False, dtype=torch.float32, width=6, state=4) -> Recurrence:
    """`bare`: no skip connection, no bias, no softplus."""
    generator = torch.Generator().manual_seed(3)
    A = -0.3 * randn(generator, width, state).exp()
    D, bias = (None, None) if bare else (randn(generator, width), randn(generator, width) - 1)

    def tokens(t, g):
        x, dt, B, C = (randn(g, t, n) for n in (width, width, state, state))
        return tuple(y.to(dtype) for y in (x, dt.abs() if bare else dt, B, C))

    def oracle(state, tokens, weights):
        outs, states = [], []
        for x, dt, B, C in zip(*(y.double() for y in tokens)):
            dt = dt if bare else F.softplus(dt + bias.double())
            state = (dt[:, None] * A.double()).exp() * state + (dt * x)[:, None] * B
            outs.append(state @ C + (0 if bare else D.double() * x))
            states.append(state)
        return torch.stack(outs), torch.stack(states)

    return Recurrence(
        OPS.selective_scan, OPS.paged_selective_scan, {"dt_softplus": not bare}, (width, state), torch.float32,
        tokens, (A, D, bias), tuple(range(7)), oracle,
    )  # fmt: skip


def wkv(dtype=torch.float32, width=6) -> Recurrence:
    generator = torch.Generator().manual_seed(4)
    decay, first = -0.2 * randn(generator, width).exp(), randn(generator, width)

    def oracle(state, tokens, weights):
        """Without scaling: the keys are small. What the op keeps is the sums, scaled by the largest exponent."""
        num, den, largest = state[0], state[1], torch.full((width,), -1e38, dtype=torch.float64)
        outs, states = [], []
        for k, v in zip(*(y.double() for y in tokens)):
            bonus = (first.double() + k).exp()
            outs.append((num + bonus * v) / (den + bonus))
            num, den = (decay.double().exp() * s + k.exp() * y for s, y in ((num, v), (den, 1)))
            largest = torch.maximum(largest + decay.double(), k)
            states.append(torch.stack([num / largest.exp(), den / largest.exp(), largest]))
        return torch.stack(outs), torch.stack(states)

    return Recurrence(
        OPS.wkv, OPS.paged_wkv, {}, (3, width), torch.float32,
        lambda t, g: (randn(g, t, width).to(dtype), randn(g, t, width).to(dtype)), (decay, first), (0, 1, 2, 3),
        oracle,
    )  # fmt: skip


def mlstm(dtype=torch.float32, heads=2, width=5, width_v=3) -> Recurrence:
    def tokens(t, g):
        q, k, v = (randn(g, t, heads, n) for n in (width, width, width_v))
        igate, fgate = randn(g, t, heads), randn(g, t, heads) + 2
        return tuple(y.to(dtype) for y in (q, k, v, igate, fgate))

    def oracle(state, tokens, weights):
        C, n = state[:, :-1, :-1], state[:, :-1, -1]
        m, outs, states = state[:, -1, -1], [], []
        for q, k, v, igate, fgate in zip(*(y.double() for y in tokens)):
            log_f = F.logsigmoid(fgate)
            C = log_f.exp()[:, None, None] * C + igate.exp()[:, None, None] * k[:, :, None] * v[:, None]
            n = log_f.exp()[:, None] * n + igate.exp()[:, None] * k
            m = torch.maximum(log_f + m, igate)
            q, scale = q * width**-0.5, (-m).exp()
            below = torch.maximum(((q * n).sum(-1) * scale).abs(), scale) + 1e-6
            outs.append(torch.einsum("hk,hkv->hv", q, C) * (scale / below)[:, None])
            packed = torch.zeros_like(state)
            packed[:, :-1, :-1], packed[:, :-1, -1] = C * scale[:, None, None], n * scale[:, None]
            packed[:, -1, -1] = m
            states.append(packed)
        return torch.stack(outs), torch.stack(states)

    return Recurrence(
        OPS.mlstm, OPS.paged_mlstm, {"scale": width**-0.5, "eps": 1e-6}, (heads, width + 1, width_v + 1),
        torch.float32, tokens, (), tuple(range(5)), oracle,
    )  # fmt: skip


def row_decay_rule(dtype=torch.float32, heads=2, width=8, width_v=5) -> Recurrence:
    """`gated_delta_rule` with a decay for each row of the state."""

    def tokens(t, g):
        q, k = (randn(g, t, heads, width) for _ in range(2))
        v, beta = 4 * randn(g, t, heads, width_v), torch.sigmoid(randn(g, t, heads))
        decay = -0.1 * randn(g, t, heads, width).exp()
        return (q.to(dtype), k.to(dtype), v.to(dtype), decay, beta.to(dtype))

    def oracle(state, tokens, weights):
        q, k, v, decay, beta = (x.double() for x in tokens)
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        outs, states = [], []
        for t in range(len(q)):
            state = state * decay[t].exp()[..., None]
            answer = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - answer))
            outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * width**-0.5)
            states.append(state)
        return torch.stack(outs), torch.stack(states)

    return Recurrence(
        OPS.gated_delta_rule, OPS.paged_gated_delta_rule, {"scale": width**-0.5, "l2norm_eps": 1e-6},
        (heads, width, width_v), torch.float32, tokens, (), (0, 1, 2, 3, 4), oracle,
    )  # fmt: skip


DEFINED = {
    "linear_recurrence": linear_recurrence,
    "selective_scan": selective_scan,
    "wkv": wkv,
    "mlstm": mlstm,
    "gated_delta_rule of rows": row_decay_rule,
}
