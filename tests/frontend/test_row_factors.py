"""Factors of rows around a softmax, numbers that rows are shifted by, softmaxes by way of their logarithms."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pagebinder.frontend.audit import audit
from pagebinder.frontend.recognise import recognise_raw_attention
from pagebinder.graph_tools import calls
from tests.frontend import plain_decoders as plain
from tests.frontend.test_raw_attention import ATTENTION, assert_verified_and_served, attend, causal, heads
from tests.graphs import captured, clone, count, run

HEAD_FACTORS = torch.tensor([0.3, -1.7])[:, None, None]


class ByParameters(nn.Module):
    """A temperature of each head, and one number."""

    def __init__(self):
        super().__init__()
        self.temperatures = nn.Parameter(torch.tensor([0.2, 1.4]))
        self.gain = nn.Parameter(torch.tensor(-0.6))

    def forward(self, x, positions):
        temperatures = self.temperatures.exp().view(1, 2, 1, 1)
        return attend(x, lambda s: causal(s * temperatures) / 0.5, lambda w: w * self.gain)


def by_position(x, positions):
    """As models that were trained on shorter texts scale longer ones: by the logarithm of the position."""
    steps = (positions + 2.0).log()[:, None, :, None]
    return attend(x, lambda s: causal(s * steps))


def by_tokens(x, positions):
    gates = torch.sigmoid(x[..., :2]).transpose(1, 2)[..., None]
    return attend(x, lambda s: causal(gates * s), lambda w: w * gates.sqrt())


def divided(x, positions):
    """Cosine attention with its norms where the scores are."""
    norms = heads(x).norm(dim=-1, keepdim=True)
    return attend(x, lambda s: causal(s / norms), lambda w: w / 3)


def capped(x, positions):
    return attend(x, lambda s: causal(torch.tanh(s * HEAD_FACTORS / 4.0) * 4.0))


def grouped(x, positions):
    """Heads as [G, group], whose factors are, too; keys and values of one head for each group."""
    q = x.view(1, -1, 2, 2, 4).permute(0, 2, 3, 1, 4)
    k = x[..., :8].view(1, -1, 2, 1, 4).permute(0, 2, 3, 1, 4)
    factors = torch.arange(1.0, 5.0).view(2, 2, 1, 1)
    weights = torch.softmax(causal((q @ k.mT) * factors), dim=-1) * (1 / factors)
    return (weights @ k).permute(0, 3, 1, 2, 4).flatten(2)


def in_einsum(x, positions):
    q = x.unflatten(-1, (2, -1))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, q) * HEAD_FACTORS
    weights = causal(scores).softmax(-1) * HEAD_FACTORS
    return torch.einsum("bhqk,bkhd->bqhd", weights, q).flatten(2)


def shifted_by_maximum(x, positions):
    return attend(x, lambda s: causal(s) - causal(s).detach().amax(-1, keepdim=True))


def shifted_by_tokens(x, positions):
    return attend(x, lambda s: causal(s + x.mean(-1)[:, None, :, None]) - 3.0)


def by_log_softmax(x, positions):
    q = heads(x)
    return (torch.log_softmax(causal(q @ q.mT), dim=-1).exp() @ q).transpose(1, 2).flatten(2)


def by_logsumexp(x, positions):
    q = heads(x)
    scores = causal(q @ q.mT)
    weights = (scores - torch.logsumexp(scores, dim=-1, keepdim=True)).exp()
    return (weights @ q).transpose(1, 2).flatten(2)


def normalised_last(x, positions):
    q = heads(x)
    exps = torch.exp(causal(q @ q.mT) - (q @ q.mT).amax(-1, keepdim=True))
    return ((exps @ q) / (exps.sum(-1, keepdim=True))).transpose(1, 2).flatten(2)


def guarded_against_nan(x, positions):
    return attend(x, lambda s: causal(torch.nan_to_num(s)))


def of_any_sign(x, positions):
    """Literals that are not positive, too, and a factor that is expanded by itself."""
    gates = x[..., :2].mT[..., None]
    return attend(x, lambda s: causal(-s * gates.expand_as(s) * -0.5), lambda w: w * -1.5)


def shifted_by_the_length(x, positions):
    return attend(x, lambda s: causal(s) - s.shape[-1])


def filled_with_the_lowest(x, positions):
    """Beyond what any factor makes of a score."""
    return attend(
        x,
        lambda s: (s * HEAD_FACTORS).masked_fill(
            positions[0] > positions[0, :, None], torch.finfo(s.dtype).min
        ),
    )


BODIES = [
    ByParameters(), by_position, by_tokens, divided, capped, grouped, in_einsum, shifted_by_maximum,
    shifted_by_tokens, of_any_sign, shifted_by_the_length, filled_with_the_lowest, by_log_softmax,
    by_logsumexp, normalised_last, guarded_against_nan,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda b: getattr(b, "__name__", type(b).__name__))
def test_attention_that_is_recognised_computes_the_same(body):
    before = captured(body)
    after = clone(before)
    result = recognise_raw_attention(after)
    assert not result.refusals and len(result.matches) == 1 and not audit(after), result.refusals
    for num_tokens in (1, 2, 17, 50):
        torch.testing.assert_close(run(after, num_tokens), run(before, num_tokens), atol=1e-5, rtol=1e-5)


def test_heads_that_share_keys_stay_in_groups():
    gm = captured(grouped)
    recognise_raw_attention(gm)
    (node,) = calls(gm.graph, ATTENTION)
    assert [n.meta["val"].shape[1] for n in node.args[:3]] == [4, 2, 2]


REFUSED = {
    "of each key": (
        lambda x, p: attend(x, lambda s: causal(s * x.mean(-1)[:, None, None])),
        "a number for each key",
    ),
    "weights of each key": (
        lambda x, p: attend(x, change_weights=lambda w: w * x.mean(-1)[:, None, None]),
        "stands between",
    ),
    "behind the soft cap": (
        lambda x, p: attend(x, lambda s: causal(s.tanh() * HEAD_FACTORS)),
        "soft-capped before",
    ),
    "of masked scores": (
        lambda x, p: attend(x, lambda s: causal(s) * HEAD_FACTORS.abs()),
        "before rows of them",
    ),
    "of the number of tokens": (
        lambda x, p: attend(x, lambda s: causal(s * torch.arange(x.shape[1]).float().sum())),
        "depends on the number of tokens",
    ),
    "of the number of tokens in disguise": (
        lambda x, p: attend(x, lambda s: causal(s * torch.ones_like(p).sum().clamp(min=90))),
        "the scores are multiplied by",
    ),
    "of all tokens": (lambda x, p: attend(x, lambda s: causal(s * x.mean())), "something else than a number"),
    "shifted before the cap": (
        lambda x, p: attend(x, lambda s: causal((s - s.amax(-1, keepdim=True)).tanh())),
        "shifted before a soft cap",
    ),
    "rounded quotients": (
        lambda x, p: attend(x, change_weights=lambda w: torch.div(w, 0.3, rounding_mode="floor")),
        "stands between",
    ),
    "shifted before a finite fill": (
        lambda x, p: attend(x, lambda s: (s - 100.0 * p[0, :, None]).masked_fill(p[0] > p[0, :, None], -1e4)),
        "shifted before hidden ones are filled with -10000",
    ),
    "shifted before a bound": (
        lambda x, p: attend(x, lambda s: causal((s - x[..., :1].unsqueeze(1)).clamp(min=-1e4))),
        "shifted before they are clamped",
    ),
    "shifted before a guard": (
        lambda x, p: attend(x, lambda s: causal(torch.nan_to_num(s - x[..., :1].unsqueeze(1)))),
        "shifted before what is not finite",
    ),
    "a factor before a fill that is near": (
        lambda x, p: attend(x, lambda s: (s * HEAD_FACTORS).masked_fill(p[0] > p[0, :, None], -1e4)),
        "factors of rows or heads before hidden ones",
    ),
    "ALiBi that shifts rows before a near fill": (
        lambda x, p: attend(
            x,
            lambda s: (s + (0.5 * p[0] - 100.0 * p[0, :, None])).masked_fill(p[0] > p[0, :, None], -1e4),
        ),
        "not 0 for its own token",
    ),
    "ALiBi that shifts rows late before a bound": (
        lambda x, p: attend(
            x,
            lambda s: causal(s + (0.5 * (p[0] - p[0, :, None]) - (p[0, :, None] - 80).clamp(0))).clamp(
                min=-1e4
            ),
        ),
        "not 0 for its own token",
    ),
    "rows of padding": (
        lambda x, p: attend(x, lambda s: causal(s - 1e9 * (p[:, None, :, None] == 7))),
        "may be rounded away",
    ),
    "rounded to integers": (
        lambda x, p: attend(x, lambda s: causal(s.to(torch.int32).float())),
        "rounded to torch.int32",
    ),
    "weights rounded to integers": (
        lambda x, p: attend(x, change_weights=lambda w: w.to(torch.int32).float()),
        "stands between",
    ),
    "a factor before a guard": (
        lambda x, p: attend(x, lambda s: causal(torch.nan_to_num(s * x[..., :1].unsqueeze(1)))),
        "factors of rows or heads before what is not finite",
    ),
    "what is hidden becomes 0": (
        lambda x, p: attend(x, lambda s: torch.nan_to_num(causal(s), neginf=0.0)),
        "nan_to_num",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_factor_of_rows_is_refused(name):
    body, reason = REFUSED[name]
    before = captured(body)
    after = clone(before)
    (refusal,) = recognise_raw_attention(after).refusals
    assert count(after, ATTENTION) == 0 and re.search(reason, refusal.reason), refusal.reason
    assert torch.equal(run(after, 20), run(before, 20))


@pytest.mark.parametrize(
    "factor",
    [
        lambda x, p: (p * 0.0 + x.shape[1]).log()[:, None, :, None],
        lambda x, p: x.mean(-1).cumsum(1)[:, None, :, None],
        lambda x, p: x.flip(1)[..., :1].unsqueeze(1),
    ],
    ids=["the length", "earlier tokens", "later tokens"],
)
def test_factors_that_see_other_tokens_are_left_to_the_audit(factor):
    gm = captured(lambda x, p: attend(x, lambda s: causal(s * factor(x, p))))
    recognise_raw_attention(gm)
    assert audit(gm)


class Tempered(plain.Attention):
    """Queries and keys of length 1, a temperature of each head and position, gains of heads."""

    def __init__(self):
        super().__init__()
        self.temperatures = nn.Parameter(torch.linspace(1.0, 3.0, plain.HEADS))
        self.gains = nn.Parameter(torch.linspace(-1.0, 1.0, plain.HEADS))
        self.heat, self.sign = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x):
        _, t, _ = x.shape
        q, k, v = (y.view(1, t, plain.HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = (nn.functional.normalize(y, dim=-1) for y in (q, k))
        scores = q @ k.mT * self.temperatures.exp().view(-1, 1, 1)
        y = ((causal(scores * self.sign) / self.heat).softmax(-1) * self.gains.view(-1, 1, 1)) @ v
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoder_with_temperatures_is_served_and_every_step_verified(dtype):
    assert_verified_and_served(plain.Decoder(Tempered), dtype)
