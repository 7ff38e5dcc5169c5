"""Sinks and soft caps as people write them, with windows and grouped heads -> operands of pagebinder.attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.frontend.audit import audit
from pagebinder.frontend.recognise import recognise_raw_attention
from pagebinder.graph_tools import calls
from tests.frontend import plain_decoders as plain
from tests.frontend.test_raw_attention import greedy
from tests.graphs import captured_model, clone, run
from tests.helpers import by_day, nightly

ATTENTION = torch.ops.pagebinder.attention.default
KV_HEADS, WINDOW = 2, 9


class WithSinks(plain.Attention):
    """Grouped heads, a window; subclasses say how scores [1, H, T, T] become weights."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1.0, 2.0, plain.HEADS))

    def forward(self, x):
        _, t, _ = x.shape
        q, k, v = (
            y.view(1, t, plain.HEADS, plain.HEAD_DIM).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        k, v = (y[:, :KV_HEADS].repeat_interleave(plain.HEADS // KV_HEADS, dim=1) for y in (k, v))
        y = self.weights(self.masked(self.scaled(q @ k.transpose(-1, -2)))) @ v
        return self.out(y.transpose(1, 2).reshape(1, t, plain.WIDTH))

    def scaled(self, scores):
        return scores * 0.5

    def masked(self, scores):
        place = torch.arange(scores.shape[-1])
        distance = place[:, None] - place
        return scores.masked_fill((distance < 0) | (distance >= WINDOW), float("-inf"))

    def column(self, scores):
        return self.sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)

    def weights(self, scores):
        return torch.cat((scores, self.column(scores)), dim=-1).softmax(-1)[..., :-1]


class MaximumSubtracted(WithSinks):
    """GPT-OSS."""

    def weights(self, scores):
        scores = torch.cat([scores, self.column(scores)], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return nn.functional.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]


class InFront(WithSinks):
    """The column comes first and is cut off in front."""

    def weights(self, scores):
        return torch.cat((self.column(scores), scores), dim=-1).softmax(-1)[..., 1:]


class Rounded(WithSinks):
    """The sinks are rounded to what the model computes in, after they were expanded."""

    def column(self, scores):
        return super().column(scores).to(torch.bfloat16).to(scores.dtype)


class OneForAll(WithSinks):
    """One number for all heads."""

    def column(self, scores):
        return self.sinks[2:3].view(1, 1, 1, 1).expand(1, plain.HEADS, scores.shape[2], 1)


class Zeros(WithSinks):
    """A key of zeros that nothing is learnt of (softmax1, add_zero_attn)."""

    def column(self, scores):
        return torch.zeros(1, plain.HEADS, scores.shape[2], 1)


class ZerosLike(WithSinks):
    def column(self, scores):
        return torch.zeros_like(scores[..., :1])


class Capped(WithSinks):
    """Scores are capped, the sink is not."""

    def scaled(self, scores):
        return 3.0 * torch.tanh(scores * 0.5 / 3.0)


class CappedAlone(Capped):
    """Gemma 2."""

    def scaled(self, scores):
        return torch.tanh((scores * 0.5) / 3.0) * 3.0

    def weights(self, scores):
        return scores.softmax(-1)


class InTheSum(WithSinks):
    """The softmax itself is written out, with one more term in its sum."""

    def weights(self, scores):
        sinks = self.sinks.view(1, -1, 1, 1)
        top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        exps = (scores - top).exp()
        return exps / (exps.sum(-1, keepdim=True) + (sinks - top).exp())


class OneInTheSum(WithSinks):
    """exp(s) / (1 + sum exp(s)), without a shift."""

    def weights(self, scores):
        exps = torch.exp(scores)
        return exps / (1 + exps.sum(-1, keepdim=True))


class NoSink(WithSinks):
    """Written out, without any."""

    def weights(self, scores):
        exps = torch.exp(scores - scores.amax(-1, keepdim=True))
        return exps / exps.sum(-1, keepdim=True)


CAP = {"soft_cap": 3.0}
STYLES = {
    WithSinks: {}, MaximumSubtracted: {}, InFront: {}, Rounded: {}, OneForAll: {}, Zeros: {}, ZerosLike: {},
    Capped: CAP, CappedAlone: CAP, InTheSum: {}, OneInTheSum: {}, NoSink: {},
}  # fmt: skip
WITHOUT_SINKS = (CappedAlone, NoSink)
WRITTEN_OUT = (InTheSum, OneInTheSum, NoSink)


BY_DAY = (WithSinks, InFront, Rounded, Zeros, Capped, InTheSum, OneInTheSum)


@pytest.mark.parametrize("style", by_day(STYLES, BY_DAY), ids=lambda s: s.__name__)
def test_sinks_and_caps_become_operands(style):
    before = captured_model(plain.Decoder(style, num_layers=1))
    after = clone(before)
    result = recognise_raw_attention(after)
    assert not result.refusals and not audit(after), result.refusals
    (node,) = calls(after.graph, ATTENTION)
    assert node.kwargs == pytest.approx({"scale": 0.5, "window": WINDOW, **STYLES[style]})
    assert [n.meta["val"].shape[1] for n in node.args[:3]] == [plain.HEADS, KV_HEADS, KV_HEADS]
    details = ["causal", f"window={WINDOW}"] + ["soft_cap=3"] * (STYLES[style] == CAP)
    has_sinks = style not in WITHOUT_SINKS
    details += ["sinks"] * has_sinks + ["softmax written out"] * (style in WRITTEN_OUT)
    assert [m.detail for m in result.matches] == [", ".join(details)]
    assert has_sinks == (len(node.args) > 3)
    for num_tokens in (1, 2, 17, 50):
        torch.testing.assert_close(run(after, num_tokens), run(before, num_tokens), atol=1e-5, rtol=1e-5)


class PerToken(WithSinks):
    def column(self, scores):
        return scores.new_zeros(1, plain.HEADS, scores.shape[2], 1) + torch.arange(scores.shape[2])[:, None]


class TwoColumns(WithSinks):
    def weights(self, scores):
        columns = self.column(scores).expand(-1, -1, -1, 2)
        return torch.cat((scores, columns), dim=-1).softmax(-1)[..., :-2]


class ScaledToo(WithSinks):
    def weights(self, scores):
        return (torch.cat((scores, self.column(scores)), dim=-1) * 0.5).softmax(-1)[..., :-1]


class CutOnTheOtherSide(WithSinks):
    def weights(self, scores):
        return torch.cat((self.column(scores), scores), dim=-1).softmax(-1)[..., :-1]


class EpsilonBesideAShift(WithSinks):
    def weights(self, scores):
        exps = torch.exp(scores - scores.amax(-1, keepdim=True))
        return exps / (exps.sum(-1, keepdim=True) + 1e-6)


class TwoTerms(WithSinks):
    def weights(self, scores):
        exps = scores.exp()
        return exps / (exps.sum(-1, keepdim=True) + self.sinks.view(1, -1, 1, 1).exp() + 1.0)


class NoExponential(WithSinks):
    def weights(self, scores):
        exps = scores.exp()
        return exps / (exps.sum(-1, keepdim=True) + self.sinks.view(1, -1, 1, 1))


NEAR_MISSES = {
    PerToken: "not of one sink per head",
    TwoColumns: "more than one column",
    ScaledToo: "masked, scaled or capped with them",
    CutOnTheOtherSide: "are cut",
    EpsilonBesideAShift: "shifted by the row's maximum",
    TwoTerms: "more than one further term",
    NoExponential: "no exponential of a sink",
}


@pytest.mark.parametrize(
    "style", by_day(NEAR_MISSES, (PerToken, CutOnTheOtherSide, EpsilonBesideAShift)), ids=lambda s: s.__name__
)
def test_near_misses_are_refused(style):
    gm = captured_model(plain.Decoder(style, num_layers=1))
    (refusal,) = recognise_raw_attention(gm).refusals
    assert NEAR_MISSES[style] in refusal.reason and "test_sinks_and_caps.py" in refusal.source_line
    assert not list(calls(gm.graph, ATTENTION)) and audit(gm)


@nightly
@pytest.mark.parametrize("style", [InTheSum, InFront, Rounded, Capped], ids=lambda s: s.__name__)
def test_it_is_verified_served_and_counted(style):
    model = plain.Decoder(style).eval()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", verify="full"))
    details = [m.detail for m in compiled.report.matches if m.pattern == "attention"]
    assert len(details) == 2 and all("sinks" in detail for detail in details)
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=96))
    prompts = [[1, 2, 3], list(range(20)), [7] * 45]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [o.token_ids for o in outputs] == [greedy(model, p, 8) for p in prompts]
