"""Convolutions over tokens and shifted tokens in own code -> pagebinder.short_conv: styles, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.frontend.audit import audit
from pagebinder.frontend.recognise import recognise_causal_conv
from tests.graphs import VOCAB_SIZE, WIDTH, assert_metadata_kept, captured, captured_model, clone, count, run

SHORT_CONV = torch.ops.pagebinder.short_conv.default


class Body(nn.Module):
    """`body(self, x [1, T, C], positions)` with convolutions and vectors to use."""

    def __init__(self, body) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = body
        self.padded = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.plain = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)
        self.dilated = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, dilation=3, bias=False)
        self.across = nn.Conv1d(WIDTH, WIDTH + 4, 3, dilation=2)
        self.same = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=1)
        self.strided = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2, stride=2)
        self.two_groups = nn.Conv1d(WIDTH, WIDTH, 3, groups=2, padding=2)
        self.mix = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x, positions):
        return self.body(self, x, positions)


def after(conv):
    """conv over x [1, T, C], which `conv` gets as [1, C, T]."""
    return lambda m, x, p: conv(m, x.transpose(1, 2)).transpose(1, 2)


def before(x, n, dim=-1):
    """n zeros before [.., T]."""
    return F.pad(x, (n, 0)) if dim == -1 else F.pad(x, (0, 0, n, 0))


STYLES = {
    "padded, cut to the length": (after(lambda m, x: m.padded(x)[..., : x.shape[-1]]), 4),
    "padded, the last cut off": (after(lambda m, x: m.padded(x)[..., :-3]), 4),
    "zeros before": (after(lambda m, x: m.plain(before(x, 3))), 4),
    "more zeros than it needs": (after(lambda m, x: m.plain(before(x, 5))[..., : x.shape[-1]]), 6),
    "zeros by both": (after(lambda m, x: m.padded(before(x, 2))[..., : x.shape[-1]]), 6),
    "an activation before the cut": (
        lambda m, x, p: F.silu(m.padded(x.transpose(1, 2))).transpose(1, 2)[:, : x.shape[1]],
        4,
    ),
    "a bias and a scale before the cut": (
        lambda m, x, p: (m.padded(x.mT) * 2.0 + m.mix[:, None]).permute(0, 2, 1)[:, : x.shape[1]],
        4,
    ),
    "a gate before the cut": (
        lambda m, x, p: (lambda y: (y * torch.sigmoid(y * 2.0))[..., : x.shape[1]].mT)(m.padded(x.mT)), 4,
    ),
    "narrow": (lambda m, x, p: m.padded(x.mT).narrow(2, 0, x.shape[1]).mT, 4),
    "dilated": (after(lambda m, x: m.dilated(before(x, 6))), 7),
    "across channels": (after(lambda m, x: m.across(before(x, 4))), 5),
    "a shift by pads": (lambda m, x, p: F.pad(x, (0, 0, 1, -1)) * m.mix + x, 2),
    "a shift by a module": (lambda m, x, p: nn.ZeroPad2d((0, 0, 1, -1))(x) * m.mix + x, 2),
    "a shift by zeros and a part": (lambda m, x, p: torch.cat([x.new_zeros(1, 2, WIDTH), x[:, :-2]], 1) * m.mix, 3),
    "a shift by a pad and a cut": (lambda m, x, p: before(x, 3, dim=1)[:, : x.shape[1]] + x, 4),
    "a shift of heads": (
        lambda m, x, p: F.pad(x.unflatten(-1, (4, -1)).transpose(1, 2), (0, 0, 1, -1)).transpose(1, 2).flatten(2),
        2,
    ),
    "written out": (
        lambda m, x, p: sum(
            m.plain.weight[:, 0, j] * before(x, 3, dim=1)[:, j : j + x.shape[1]] for j in range(4)
        ),
        None,
    ),
    "a shift of two parts": (
        lambda m, x, p: torch.cat([torch.zeros(1, 1, WIDTH), torch.zeros(1, 1, WIDTH), x], 1)[:, :-2] - x,
        3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STYLES)
def test_a_style_becomes_one_short_convolution(name):
    body, taps = STYLES[name]
    source = captured(Body(body))
    rewritten = clone(source)
    result = recognise_causal_conv(rewritten)
    expected = ["4 taps", "3 taps", "2 taps"] if taps is None else [f"{taps} taps"]
    assert sorted(m.detail for m in result.matches) == sorted(expected) and not result.refusals
    assert count(rewritten, SHORT_CONV) == len(expected) and not audit(rewritten)
    assert_metadata_kept(rewritten, SHORT_CONV)
    for num_tokens in (4, 5, 19):
        torch.testing.assert_close(run(rewritten, num_tokens), run(source, num_tokens))


def test_several_in_a_row_and_several_users():
    def body(m, x, p):
        y = m.padded(x.mT)[..., : x.shape[1]].mT
        z = F.pad(y, (0, 0, 1, -1))
        return m.padded((z + y).mT)[..., : x.shape[1]].mT + F.pad(z, (0, 0, 2, -2)) * z

    source = captured(Body(body))
    rewritten = clone(source)
    assert len(recognise_causal_conv(rewritten).matches) == count(rewritten, SHORT_CONV) == 4
    assert not audit(rewritten)
    torch.testing.assert_close(run(rewritten, 17), run(source, 17))


class OfIds(nn.Module):
    """Embeds the ids of the token and of the one before it."""

    def __init__(self, shifted) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.one, self.two = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(VOCAB_SIZE, WIDTH)
        self.shifted = shifted

    def forward(self, input_ids, position_ids):
        return self.one(input_ids) + self.two(self.shifted(input_ids))


def test_ids_behind_a_number_that_float32_rounds_are_refused():
    rewritten = clone(captured_model(OfIds(lambda ids: F.pad(ids, (1, -1), value=10**9) % VOCAB_SIZE)))
    (refusal,) = recognise_causal_conv(rewritten).refusals
    assert "behind 1000000000" in refusal.reason and audit(rewritten)


IDS = {
    "pads": lambda ids: F.pad(ids, (1, -1)),
    "pads with an id": lambda ids: F.pad(ids, (2, -2), value=7),
    "a part behind a constant": lambda ids: torch.cat([torch.full((1, 1), 3), ids[:, :-1]], 1),
}


@pytest.mark.parametrize("name", IDS)
def test_ids_are_shifted_exactly(name):
    source = captured_model(OfIds(IDS[name]))
    rewritten = clone(source)
    assert len(recognise_causal_conv(rewritten).matches) == 1 and not audit(rewritten)
    for num_tokens in (3, 12):
        assert torch.equal(run(rewritten, num_tokens), run(source, num_tokens))


NEAR_MISSES = {
    "both sides": (after(lambda m, x: m.same(x)), "1 zeros before the tokens and 3 taps looks at later tokens"),
    "a later part": (after(lambda m, x: m.padded(x)[..., 1:-2]), "computes beyond the tokens is used"),
    "what comes behind is used": (
        after(lambda m, x: m.padded(x)[..., : x.shape[-1]] + m.padded(x).mean(-1, keepdim=True)),
        "computes beyond the tokens is used",
    ),
    "a gate by something longer": (
        after(lambda m, x: (m.padded(x) * m.padded(x).flip(-1))[..., : x.shape[-1]]), "computes beyond the tokens",
    ),
    "zeros behind, too": (after(lambda m, x: m.plain(F.pad(x, (1, 2)))), "1 zeros before the tokens and 4 taps"),
    "ones before": (after(lambda m, x: m.plain(F.pad(x, (3, 0), value=1.0))), "something else than the tokens"),
    "repeated before": (
        after(lambda m, x: m.plain(F.pad(x, (3, 0), mode="replicate"))), "something else than the tokens",
    ),
    "groups": (after(lambda m, x: m.two_groups(x)[..., : x.shape[-1]]), "in 2 groups"),
    "a shift with ones": (lambda m, x, p: F.pad(x, (0, 0, 1, -1), value=1.0) + x, "with 1.0 before the first"),
    "whole numbers behind a huge one": (
        lambda m, x, p: x + F.pad((x * 9).long(), (0, 0, 1, -1), value=10**9),
        "not their ids, or behind",
    ),
    "whole numbers": (
        lambda m, x, p: x + F.pad((x * 9).long(), (0, 0, 1, -1)),
        "whole numbers that are not their ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_refused_with_its_place(name):
    body, reason = NEAR_MISSES[name]
    source = captured(Body(body))
    rewritten = clone(source)
    result = recognise_causal_conv(rewritten)
    assert any(re.search(reason, refusal.reason) for refusal in result.refusals), result.refusals
    assert all(r.pattern == "causal_conv" and ".py:" in r.source_line for r in result.refusals)
    assert audit(rewritten)  # which keeps it from being served


OTHERS = {
    "the next token": lambda m, x, p: F.pad(x, (0, 0, -1, 1)) + x,
    "cut, then zeros": lambda m, x, p: before(before(x, 1, dim=1)[:, 2:], 1, dim=1) + x,
    "padding by name": after(lambda m, x: F.conv1d(x, m.plain.weight, groups=WIDTH, padding="same")),
    "around the end": lambda m, x, p: torch.roll(x, 1, 1) + x,
    "a learned first one": lambda m, x, p: torch.cat([m.mix[None, None], x[:, :-1]], 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_shift_is_left_to_the_audit(name):
    rewritten = clone(captured(Body(OTHERS[name])))
    assert not recognise_causal_conv(rewritten).matches and count(rewritten, SHORT_CONV) == 0
    assert audit(rewritten)


class Layer(nn.Module):
    """Attention over tokens that were convolved and mixed with the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.qkv, self.o, self.mix = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.rand(WIDTH)),
        )

    def forward(self, x):
        y = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        y = y + self.mix * F.pad(y, (0, 0, 1, -1))
        q, k, v = self.qkv(F.rms_norm(y, (WIDTH,))).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.before = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(VOCAB_SIZE, WIDTH)
        self.places, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, VOCAB_SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, input_ids, position_ids):
        x = (
            self.embed(input_ids)
            + self.before(F.pad(input_ids, (1, -1), value=5))
            + self.places(position_ids)
        )
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("executable", ["eager", "native"])
@torch.no_grad()
def test_a_decoder_of_its_own_kind_is_served_token_exact(executable):
    torch.manual_seed(3)
    model = Decoder().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(2.0)
    compiled = pagebinder.compile_model(
        model, CompileConfig(executable=executable, verify="full", block_size=16)
    )
    prompts = [[(7 * i + k) % VOCAB_SIZE for i in range(n)] for k, n in enumerate((1, 2, 5, 21, 40))]
    prompts.append(prompts[3] + [4, 5])
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(20):
            tokens.append(int(model(torch.tensor([tokens]), torch.arange(len(tokens))[None])[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    params = SamplingParams(max_tokens=20, temperature=0.0)
    for options in ({}, {"max_num_batched_tokens": 7}, {"drafter": "ngram"}, {"max_num_seqs": 2}):
        engine = compiled.engine(EngineConfig(num_kv_blocks=80, check_integrity=True, **options))
        assert [o.token_ids for o in engine.generate(prompts, params)] == expected, options
