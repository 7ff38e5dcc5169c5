"""Sums of softmaxes, and heads that are taken of weights: differential attention as people write it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.frontend.audit import audit
from pagebinder.frontend.recognise import recognise_raw_attention
from pagebinder.graph_tools import calls
from tests.frontend import plain_decoders as plain
from tests.frontend.test_raw_attention import ATTENTION, assert_verified_and_served, causal, heads
from tests.graphs import captured, captured_model, clone, count, run

PAIRS, HEAD_DIM = 2, plain.WIDTH // 4


class Differential(plain.Attention):
    """Two softmaxes per head; subclasses say where they come from. Values are of two heads' width."""

    def __init__(self):
        super().__init__()
        self.share = nn.Parameter(torch.tensor(0.7))
        self.norm = nn.RMSNorm(2 * HEAD_DIM)

    def forward(self, x):
        y = self.norm(self.weights(*self.qkv(x)[..., : 2 * plain.WIDTH].chunk(2, -1)) @ self.values(x))
        return self.out(y.transpose(1, 2).flatten(2))

    def values(self, x):
        return self.qkv(x)[..., 2 * plain.WIDTH :].unflatten(-1, (PAIRS, -1)).transpose(1, 2)

    def scores(self, q, k):
        q, k = (y.unflatten(-1, (2 * PAIRS, -1)).transpose(1, 2) for y in (q, k))
        return torch.matmul(q * HEAD_DIM**-0.5, k.transpose(-1, -2))


class TwoSoftmaxes(Differential):
    def weights(self, q, k):
        (q1, q2), (k1, k2) = (y.unflatten(-1, (PAIRS, 2, -1)).permute(3, 0, 2, 1, 4) for y in (q, k))
        first, second = (causal(a @ b.mT / 3).softmax(-1) for a, b in ((q1, k1), (q2, k2)))
        return (first - self.share * second) * (1 - 0.2)


class PairsOfHeads(Differential):
    """As Microsoft's code has it: heads in pairs, a mask that is added, what is not finite replaced."""

    def weights(self, q, k):
        scores = torch.nan_to_num(self.scores(q, k))
        t = scores.shape[-1]
        scores = scores + torch.triu(torch.zeros([t, t]).float().fill_(float("-inf")).type_as(scores), 1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores)
        weights = weights.view(1, PAIRS, 2, t, t)
        return weights[:, :, 0] - self.share * weights[:, :, 1]


class HalvesOfHeads(Differential):
    """Cut with chunk, a factor of each head, dropout between the difference and the values."""

    def __init__(self):
        super().__init__()
        self.shares = nn.Parameter(torch.linspace(0.3, 0.8, PAIRS))

    def weights(self, q, k):
        first, second = causal(self.scores(q, k)).softmax(-1).chunk(2, dim=1)
        return self.dropout(first - self.shares.view(-1, 1, 1) * second).to(q.dtype)


class Unbound(Differential):
    def weights(self, q, k):
        first, second = causal(self.scores(q, k)).softmax(-1).unflatten(1, (PAIRS, 2)).unbind(2)
        return first - self.share * second


class EverySecond(Differential):
    """A mask that differs between no heads but has a dimension for them; a softmax written out."""

    def weights(self, q, k):
        scores = self.scores(q, k)
        t = scores.shape[-1]
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1).expand(2 * PAIRS, t, t)
        exps = scores.masked_fill(hidden, float("-inf")).exp()
        weights = exps / exps.sum(-1, keepdim=True)
        return weights[:, ::2] - self.share * weights[:, 1::2]


STYLES = [TwoSoftmaxes, PairsOfHeads, HalvesOfHeads, Unbound, EverySecond]


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_both_softmaxes_are_attentions_of_their_own(style):
    before = captured_model(plain.Decoder(style))
    after = clone(before)
    result = recognise_raw_attention(after)
    assert not result.refusals and len(result.matches) == 4 and not audit(after), result.refusals
    for node in calls(after.graph, ATTENTION):
        assert [n.meta["val"].shape[1:] for n in node.args[:3]] == [(PAIRS, 8), (PAIRS, 8), (PAIRS, 16)]
    for num_tokens in (1, 2, 17, 50):
        torch.testing.assert_close(run(after, num_tokens), run(before, num_tokens), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_differential_attention_is_served_and_every_step_verified(style, dtype):
    assert_verified_and_served(plain.Decoder(style), dtype)


def three_of_four(x, positions):
    """A sum of sums, of heads of which one is used twice."""
    q = heads(x, 4)
    weights = torch.softmax(causal(q @ q.mT), dim=-1)
    mixed = weights[:, 0:2] + 0.5 * weights[:, 1:3] - weights[:, 2:4] / 3
    return (mixed @ heads(x)).transpose(1, 2).flatten(2)


def in_einsums(x, positions):
    q = x.unflatten(-1, (2, -1))
    first, second = (
        causal(torch.einsum("bqhd,bkhd->bhqk", a, b)).softmax(-1) for a, b in ((q, q), (q.sin(), q))
    )
    return torch.einsum("bhqk,bkhd->bqhd", first - 0.4 * second, q).flatten(2)


@pytest.mark.parametrize(("body", "attentions"), [(three_of_four, 3), (in_einsums, 2)])
def test_sums_of_any_number(body, attentions):
    before = captured(body)
    after = clone(before)
    result = recognise_raw_attention(after)
    assert len(result.matches) == attentions and not result.refusals and not audit(after), result.refusals
    for num_tokens in (1, 2, 17):
        torch.testing.assert_close(run(after, num_tokens), run(before, num_tokens), atol=1e-5, rtol=1e-4)


def with_itself(x, positions):
    """A token's own value, once more: a sum of weights and of a matrix of ones on the diagonal."""
    q = heads(x)
    weights = torch.softmax(causal(q @ q.mT), dim=-1) + torch.eye(x.shape[1])
    return (weights @ q).transpose(1, 2).flatten(2)


def sum_read_twice(x, positions):
    q = heads(x)
    weights = torch.softmax(causal(q @ q.mT), dim=-1) - torch.softmax(causal(q.sin() @ q.mT), dim=-1)
    return (weights @ q).transpose(1, 2).flatten(2) + weights.amax((1, 3))[..., None]


def heads_that_see_each_other(x, positions):
    q = heads(x, 4)
    scores = causal(q @ q.mT).cumsum(1)
    weights = torch.softmax(scores, dim=-1)
    return ((weights[:, :2] - weights[:, 2:]) @ heads(x)).transpose(1, 2).flatten(2)


def heads_in_another_order(x, positions):
    q = heads(x, 4)
    weights = torch.softmax(causal(q @ q.mT), dim=-1)[:, [2, 0]]
    return (weights @ heads(x)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "body", [with_itself, sum_read_twice, heads_that_see_each_other, heads_in_another_order]
)
def test_what_is_no_such_sum_stays_refused(body):
    before = captured(body)
    after = clone(before)
    result = recognise_raw_attention(after)
    assert result.refusals and not result.matches and count(after, ATTENTION) == 0 and audit(after)
    torch.testing.assert_close(run(after, 20), run(before, 20))
