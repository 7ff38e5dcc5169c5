"""The audit of recurrences: sound with the tokens in front, refused otherwise; rows of several heads of a token."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.frontend.audit import audit
from tests.graphs import WIDTH, captured

OPS = torch.ops.pagebinder
HEADS = 4
WEIGHT = nn.Parameter(torch.randn(WIDTH, 4))


class Weighted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(WIDTH, 4))

    def forward(self, x, positions):
        return self.function(x, self.weight)


def heads(x, count=HEADS):
    return x[0].view(-1, count, WIDTH // count)


def delta(q, k, v, g):
    return OPS.gated_delta_rule(q, k, v, g, torch.sigmoid(g), scale=0.5)


def ssd(x, A):
    h = heads(x)
    return OPS.ssd(h, h[..., 0], A, h[:, :1], h[:, :1], A, A, dt_softplus=True).flatten(1)[None]


SOUND = {
    "short convolution": lambda x, w: OPS.short_conv(x[0], w, None, activation="silu")[None],
    "delta rule": lambda x, w: delta(heads(x), heads(x), heads(x), -heads(x)[..., 0].abs()).flatten(1)[None],
    "state space": lambda x, w: ssd(x, -w[:4, 0].abs()),
    "linear recurrence": lambda x, w: OPS.linear_recurrence(x[0], torch.sigmoid(x[0]))[None],
    "selective scan": lambda x, w: OPS.selective_scan(
        x[0], x[0], x[0] @ w, x[0] @ w, w, None, w[:, 0], dt_softplus=True
    )[None],
    "weighted mean": lambda x, w: OPS.wkv(x[0], x[0], w[:, 0], w[:, 1])[None],
    "matrix memory": lambda x, w: OPS.mlstm(
        heads(x), heads(x), heads(x), x[0] @ w, x[0] @ w, scale=1.0, eps=1e-6
    ).flatten(1)[None],
    "delta rule with a decay of each row": lambda x, w: OPS.gated_delta_rule(
        heads(x), heads(x), heads(x), -heads(x).abs(), heads(x)[..., 0], scale=0.5
    ).flatten(1)[None],
    "heads as rows": lambda x, w: torch.sigmoid(x.reshape(-1, 4)).reshape(1, -1, WIDTH),
    "a norm of each head as rows": lambda x, w: (
        x.reshape(-1, 4) * torch.rsqrt(x.reshape(-1, 4).pow(2).mean(-1, keepdim=True) + 1e-6)
    ).reshape(x.shape),
    "rows of heads gated by rows of heads": lambda x, w: (
        x.reshape(-1, 4) * torch.sigmoid((x @ w @ w.mT).reshape(-1, 4))
    ).reshape(x.shape),
}


def rows_before_tokens(x):
    """[heads, T, D] cut as rows: row r belongs to token r % T."""
    return x[0].view(-1, HEADS, WIDTH // HEADS).transpose(0, 1).reshape(-1, WIDTH // HEADS)


UNSOUND = {
    "tokens in the middle": lambda x, w: (
        OPS.ssd(x[0].mT[:, :, None], x[0].mT, x[0, 0], x[0].mT[:, :1, None], x[0].mT[:, :1, None],
                None, None, dt_softplus=True)[..., 0].mT[None]
    ),
    "taps that depend on tokens": lambda x, w: (
        OPS.short_conv(x[0] @ w, (x[0].mT @ x[0])[:4, :4], None, activation=None)[None]
    ),
    "rows of heads as tokens": lambda x, w: OPS.linear_recurrence(
        x.reshape(-1, 4), torch.sigmoid(x.reshape(-1, 4))
    ).reshape(x.shape),
    "decays that depend on tokens": lambda x, w: (
        OPS.wkv(x[0] @ w, x[0] @ w, (x[0].mT @ x[0])[0, :4], w[0])[None]
    ),
    "a scan along the channels": lambda x, w: OPS.linear_recurrence(x[0].mT, x[0].mT).mT[None],
    "tokens as channels": lambda x, w: OPS.short_conv(x[0].mT, x[0] @ w, None, activation=None).mT[None],
    "heads before tokens as rows": lambda x, w: rows_before_tokens(x).reshape(1, -1, WIDTH),
    "rows of heads summed": lambda x, w: x.reshape(-1, 4).sum(0).expand(x.shape[1], 4)[None],
    "rows of heads added up": lambda x, w: x.reshape(-1, 4).cumsum(0).reshape(x.shape),
    "rows of heads cut": lambda x, w: x.reshape(-1, 4)[: x.shape[1]][None],
    "rows of heads turned around": lambda x, w: x.reshape(-1, 4).flip(0).reshape(x.shape),
    "tokens repeated": lambda x, w: x.repeat(1, 2, 1)[:, : x.shape[1]],
    "tokens behind each other": lambda x, w: torch.cat([x, x], dim=1).view(1, -1, 2 * WIDTH),
}  # fmt: skip


@pytest.mark.parametrize("function", SOUND.values(), ids=SOUND)
def test_sound(function):
    assert audit(captured(Weighted(function))) == []


@pytest.mark.parametrize("function", UNSOUND.values(), ids=UNSOUND)
def test_unsound(function):
    assert audit(captured(Weighted(function)))
