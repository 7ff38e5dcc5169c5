"""Biases by distance in attention that is written out, or in SDPA's mask: tables, formulas, learned slopes."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pagebinder
from pagebinder import CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.frontend.audit import audit
from pagebinder.frontend.recognise import recognise_raw_attention, recognise_sdpa
from pagebinder.graph_tools import calls
from tests.frontend import plain_decoders as plain
from tests.frontend.test_raw_attention import ATTENTION, assert_verified_and_served, causal, greedy, heads
from tests.graphs import captured, clone, count, run

RELATIVE = torch.ops.pagebinder.relative_attention.default
HEADS, ENTRIES = 2, 12


def distances(positions):
    """[T, T], p - j"""
    return positions[0, :, None] - positions[0]


class Biased(nn.Module):
    """Attention with the bias that `bias(positions)` returns, [.., T, T]; `table` is what is learned of it."""

    shape: tuple[int, ...] = (HEADS, ENTRIES)
    by_sdpa = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Parameter(2 * torch.randn(self.shape))

    def scores(self, scores, positions):
        return causal(scores * 0.3 + self.bias(positions))

    def forward(self, x, positions):
        q = heads(x)
        if self.by_sdpa:
            mask = causal(self.bias(positions).to(q.dtype))
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)
        return (self.scores(q @ q.mT, positions).softmax(-1) @ q).transpose(1, 2).flatten(2)


class Buckets(Biased):
    """T5's: one for each near distance, then ever longer stretches, the last from 40 on."""

    shape = (ENTRIES, HEADS)

    def bias(self, positions):
        far = distances(positions).clamp(min=0)
        exact = ENTRIES // 2
        steps = torch.log(far.float().clamp(min=1) / exact) / math.log(40 / exact) * (ENTRIES - exact)
        buckets = torch.where(far < exact, far, (exact + steps.long()).clamp(max=ENTRIES - 1))
        return F.embedding(buckets, self.table).permute(2, 0, 1)


class BySdpa(Buckets):
    by_sdpa = True


class Clipped(Biased):
    def bias(self, positions):
        return self.table[:, distances(positions).clamp(0, ENTRIES - 1)]


class OfAllHeads(Biased):
    shape = (ENTRIES,)

    def bias(self, positions):
        return self.table[distances(positions).clamp(0, ENTRIES - 1)]


class InHalf(Clipped):
    def bias(self, positions):
        return super().bias(positions).half()


class ThenNothing(Biased):
    """Beyond the table there is no bias."""

    def bias(self, positions):
        far = distances(positions)
        return torch.where(far < ENTRIES, super_bias(self, far), self.table.new_zeros(()))


def super_bias(module, far):
    return module.table[:, far.clamp(0, ENTRIES - 1)]


class ScaledAfterwards(Clipped):
    def scores(self, scores, positions):
        return causal((scores - self.bias(positions)) / 0.7)


class WithinAWindow(Clipped):
    def bias(self, positions):
        return super().bias(positions).masked_fill(distances(positions) >= 9, -torch.inf)


class Gathered(Biased):
    def bias(self, positions):
        far = distances(positions).clamp(0, ENTRIES - 1)
        pairs = far.reshape(1, -1).expand(HEADS, -1)
        return torch.gather(self.table, 1, pairs).view(HEADS, *far.shape)


class FarStep(Biased):
    """What tells distances apart is a number that the graph makes: 300 times 9."""

    def bias(self, positions):
        far = distances(positions) >= torch.tensor(300) * 9
        return self.table[:, far.long()]


class OfATable(Biased):
    """Positive numbers made of the parameter, before they are looked up."""

    def bias(self, positions):
        return F.softplus(self.table.flip(1))[:, distances(positions).clamp(0, ENTRIES - 1)]


class Formula(Biased):
    def bias(self, positions):
        return -(distances(positions).float() / 3).square().clamp(max=20.0)


class Buffer(Biased):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.randn(HEADS, ENTRIES))

    def bias(self, positions):
        return self.kept[:, distances(positions).clamp(0, ENTRIES - 1)]


# form -> distances with an entry of their own
FORMS = {
    Buckets: 31, BySdpa: 31, Clipped: ENTRIES, OfAllHeads: ENTRIES, InHalf: ENTRIES, ThenNothing: ENTRIES + 1,
    ScaledAfterwards: ENTRIES, WithinAWindow: 9, Gathered: ENTRIES, FarStep: 2701, OfATable: ENTRIES, Formula: 15,
    Buffer: ENTRIES,
}  # fmt: skip


def recognised(body):
    before = captured(body)
    after = clone(before)
    results = [recognise(after) for recognise in (recognise_sdpa, recognise_raw_attention)]
    return before, after, [m for r in results for m in r.matches], [r for x in results for r in x.refusals]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_bias_by_distance_becomes_a_table(form):
    before, after, matches, refusals = recognised(form())
    assert not refusals and len(matches) == 1, refusals
    assert "a bias by distance" in matches[0].detail
    assert not audit(after)
    (node,) = calls(after.graph, RELATIVE)
    assert node.kwargs["num_behind"] == FORMS[form] - 1
    assert tuple(node.args[3].meta["val"].shape) == (HEADS, FORMS[form])
    for num_tokens in (1, 2, 17, 60):
        torch.testing.assert_close(run(after, num_tokens), run(before, num_tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", [Buckets, OfATable, ThenNothing, ScaledAfterwards], ids=lambda f: f.__name__)
def test_weights_that_change_are_followed(form):
    """Also where they are 0 at first, as such tables often are: that is no reason to leave the bias out."""
    body = form()
    nn.init.zeros_(body.table)
    before, after, _, refusals = recognised(body)
    assert not refusals
    nn.init.normal_(body.table, std=2)
    torch.testing.assert_close(run(after, 50), run(before, 50), atol=1e-5, rtol=1e-5)


class Slopes(Biased):
    shape = (HEADS,)

    def bias(self, positions):
        return -self.table[:, None, None] * distances(positions)


class PositiveSlopes(Slopes):
    def bias(self, positions):
        return self.table.exp()[:, None, None] * -distances(positions) * 0.5


@pytest.mark.parametrize("form", [Slopes, PositiveSlopes], ids=lambda form: form.__name__)
def test_learned_slopes_are_alibi(form):
    body = form()
    before, after, matches, refusals = recognised(body)
    assert not refusals and "ALiBi" in matches[0].detail
    (node,) = calls(after.graph, ATTENTION)
    assert tuple(node.args[4].meta["val"].shape) == (HEADS,)
    for _ in range(2):
        torch.testing.assert_close(run(after, 50), run(before, 50), atol=1e-5, rtol=1e-5)
        nn.init.uniform_(body.table)


class Growing(Biased):
    def bias(self, positions):
        return -torch.log1p(distances(positions).abs().float())


class ByRow(Biased):
    def bias(self, positions):
        return (
            super_bias(self, distances(positions)) + (positions[0, :, None] > 700) * self.table[:, :1, None]
        )


class ByColumn(Biased):
    def bias(self, positions):
        far = distances(positions).clamp(0, ENTRIES - 2)
        return self.table[:, far + (positions[0] == 30_000)]


class ByLength(Biased):
    def bias(self, positions):
        return self.table[:, (distances(positions) * 5 // positions.shape[1]).clamp(0, ENTRIES - 1)]


class ShiftedRows(Biased):
    def bias(self, positions):
        return super_bias(self, distances(positions)) + 0.1 * positions[0, :, None]


class TwoParameters(Biased):
    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.randn(HEADS))

    def bias(self, positions):
        return super_bias(self, distances(positions)) * self.other[:, None, None]


class Squared(Biased):
    def bias(self, positions):
        return super_bias(self, distances(positions)).square()


class Moved(Biased):
    def bias(self, positions):
        return super_bias(self, distances(positions)) + 1.0


class OtherHeads(Biased):
    shape = (3, ENTRIES)

    def scores(self, scores, positions):
        return causal(scores + self.bias(positions)[:2] + self.bias(positions)[1:])

    bias = Clipped.bias


class Capped(Clipped):
    def scores(self, scores, positions):
        return causal(5 * torch.tanh(scores / 5) + self.bias(positions))


class NearFill(Clipped):
    def scores(self, scores, positions):
        return (scores + self.bias(positions)).masked_fill(distances(positions) < 0, -2e4)


class FarNumber(Biased):
    def bias(self, positions):
        far = distances(positions)
        return self.table[:, far.clamp(0, ENTRIES - 2) + (far > 90_000)]


REFUSED = {
    Growing: "not linear in the distance",
    ByRow: "parameters in several places",
    ByColumn: "more than the head and the distance",
    ByLength: "more than the head and the distance",
    ShiftedRows: "more than the head and the distance",
    TwoParameters: "parameters in several places",
    Squared: "more than entries of one parameter",
    Moved: "more than entries of one parameter",
    OtherHeads: "several biases",
    Capped: "soft-capped",
    NearFill: "a learned bias may come close to",
    FarNumber: "too far to be compared",
}


@pytest.mark.parametrize("form", REFUSED, ids=lambda form: form.__name__)
def test_any_other_bias_is_refused_with_the_reason(form):
    _, after, matches, refusals = recognised(form())
    assert not matches and count(after, RELATIVE) == 0
    (refusal,) = refusals
    assert re.search(REFUSED[form], refusal.reason), refusal.reason


class OfSomeLengths(plain.Attention):
    """A learned table with an entry for each distance of MAX_TOKENS tokens, to both sides."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * plain.MAX_TOKENS - 1, plain.HEADS))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            y.view(b, t, plain.HEADS, -1).transpose(1, 2) for y in self.qkv(x).split(plain.WIDTH, dim=2)
        )
        places = torch.arange(t, device=x.device)
        bias = self.table[places[:, None] - places + plain.MAX_TOKENS - 1].permute(2, 0, 1)
        mask = bias.to(q.dtype).masked_fill(places[:, None] < places, -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


def test_a_decoder_is_served_up_to_the_length_of_its_table():
    model = plain.Decoder(OfSomeLengths).eval()
    assert_verified_and_served(model, torch.float32)
    with pytest.raises(ConfigError, match=rf"more than the {plain.MAX_TOKENS} tokens"):
        pagebinder.compile_model(model, CompileConfig(executable="eager", max_model_len=plain.MAX_TOKENS + 1))


def test_weights_that_change_later_are_followed_by_an_engine():
    model = plain.Decoder(OfSomeLengths).eval()
    for layer in model.layers:
        nn.init.zeros_(layer.table)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    for layer in model.layers:
        nn.init.normal_(layer.table, std=3)
    engine = compiled.engine(EngineConfig(num_kv_blocks=16, max_num_batched_tokens=24))
    prompts = [[1, 2, 3], [7] * 45]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [o.token_ids for o in outputs] == [greedy(model, p, 8) for p in prompts]


class MaskAsParameter(Biased):
    """What is a buffer in most models: it hides by its values, so it is taken as it is."""

    alibi = False

    def __init__(self):
        super().__init__()
        places = torch.arange(plain.MAX_TOKENS)
        far = places[:, None] - places
        slopes = torch.tensor([0.5, 0.25])[:, None, None] if self.alibi else 0.0
        self.kept = nn.Parameter((-slopes * far).masked_fill(far < 0, -torch.inf), requires_grad=False)

    def bias(self, positions):
        num_tokens = positions.shape[1]
        return self.kept[..., :num_tokens, :num_tokens]


class MaskAsParameterBySdpa(MaskAsParameter):
    by_sdpa = True


class AlibiAsParameter(MaskAsParameter):
    alibi = True


class AlibiAsParameterBySdpa(MaskAsParameterBySdpa):
    alibi = True


@pytest.mark.parametrize(
    "form",
    [MaskAsParameter, MaskAsParameterBySdpa, AlibiAsParameter, AlibiAsParameterBySdpa],
    ids=lambda form: form.__name__,
)
def test_a_mask_that_is_a_parameter_is_a_mask(form):
    before, after, matches, refusals = recognised(form())
    assert not refusals and ("ALiBi" in matches[0].detail) == form.alibi
    assert count(after, ATTENTION) == 1
    torch.testing.assert_close(run(after, 50), run(before, 50), atol=1e-5, rtol=1e-5)


def test_weights_are_not_needed():
    with torch.device("meta"):
        model = plain.Decoder(OfSomeLengths).eval()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    assert compiled.max_model_len == plain.MAX_TOKENS
    assert count(compiled.graphs["semantic"], RELATIVE) == 2
