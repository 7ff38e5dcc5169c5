"""How modules are called: which parameter gets positions, which gets nothing, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.frontend.plain_calls import PlainCall, plain_call
from tests.frontend import plain_decoders as plain
from tests.frontend.plain_decoders import VOCAB_SIZE, WIDTH

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = [3, 31, 7]


class Causal(nn.Module):
    """A decoder without positions; a mask or types of tokens change what it computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def logits(self, input_ids, scale=None, positions=None):
        x = self.embed(input_ids)
        x = x if scale is None else x * scale[..., None]
        x = x if positions is None else x + torch.sin(positions[..., None] / 3)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class MaskFirst(Causal):
    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return self.logits(input_ids, attention_mask, position_ids)


class TypesFirst(Causal):
    def forward(self, ids, token_type_ids=None, positions=None):
        return self.logits(ids, token_type_ids, positions)


class MaskAlone(Causal):
    def forward(self, ids, attention_mask=None):
        return self.logits(ids, attention_mask)


class IdsAlone(Causal):
    def forward(self, ids):
        return self.logits(ids)


class PositionsFirst(Causal):
    def forward(self, positions, input_ids):
        return self.logits(input_ids, positions=positions)


class ByName(Causal):
    def forward(self, *, pos_ids, input_ids, use_cache=True):
        assert not use_cache
        return self.logits(input_ids, positions=pos_ids)


class Unnamed(Causal):
    def forward(self, x, y):
        return self.logits(x, positions=y)


class PassingOn(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def compiled(model, **options):
    return pagebinder.compile_model(model.eval(), CompileConfig(executable="eager", **options))


def greedy(model, takes_positions):
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            positions = torch.arange(len(ids))[None] if takes_positions else None
            ids.append(int(model.logits(torch.tensor([ids]), positions=positions)[0, -1].argmax()))
    return ids[len(PROMPT) :]


TAKES_POSITIONS = {
    MaskFirst: True, TypesFirst: True, MaskAlone: False, IdsAlone: False, PositionsFirst: True, ByName: True,
    Unnamed: True,
}  # fmt: skip


@pytest.mark.parametrize("around", [False, True], ids=["itself", "wrapped"])
@pytest.mark.parametrize("kind", TAKES_POSITIONS)
def test_positions_reach_what_is_named_so_and_nothing_else(kind, around):
    model = kind()
    served = compiled(PassingOn(model) if around else model)
    (answer,) = served.engine(EngineConfig(num_kv_blocks=16)).generate([PROMPT], GREEDY)
    assert list(answer.token_ids) == greedy(model, TAKES_POSITIONS[kind])


class Twice(nn.Module):
    """Around two modules: it is not known which one is given what it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.other = inner, nn.Identity()

    def forward(self, *args):
        return self.other(self.inner(*args))


class Y(Causal):
    def forward(self, x, y=None):
        return self.logits(x, y)


@pytest.mark.parametrize(
    ("model", "what"), [(Twice(MaskAlone()), "its second argument"), (Y(), "`y`")], ids=["args", "named"]
)
def test_an_optional_argument_that_positions_change_is_not_taken_for_positions(model, what):
    with pytest.raises(CaptureError, match=f"something else when {what} is given positions"):
        compiled(model)


class OptionalPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = plain.Decoder(plain.MultiheadAttention)

    def forward(self, x, p=None):
        return self.decoder(x, torch.arange(x.shape[1])[None] if p is None else p)


class OtherPositions(OptionalPositions):
    """`own`: what it counts without them."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, x, p=None):
        return self.decoder(x, self.own(torch.arange(x.shape[1])[None]) if p is None else p)


@pytest.mark.parametrize("own", [lambda p: p.clamp(max=10), lambda p: p % 16, lambda p: p.clamp(max=100)])
def test_an_optional_argument_that_counts_otherwise_from_some_position_on_is_refused(own):
    with pytest.raises(CaptureError, match="something else when `p` is given positions"):
        compiled(OtherPositions(own))


def test_an_optional_argument_that_counts_from_0_without_positions_is_positions():
    assert compiled(OptionalPositions()).source.vocab_size == VOCAB_SIZE


class CallsBack(OptionalPositions):
    def forward(self, x, callback=None):
        if callback:
            callback(x)
        return super().forward(x)


def test_what_fails_with_positions_is_given_none():
    assert compiled(CallsBack(), verify="sample").source.vocab_size == VOCAB_SIZE


class CountsRows(OptionalPositions):
    def forward(self, idx, targets=None):
        return super().forward(idx)


def test_a_module_that_counts_rows_is_given_positions_for_them():
    served, model = compiled(CountsRows()), CountsRows.forward
    assert [p.name for p in served.report.passes if p.name == "recognise_row_positions" and p.matches]
    ids = torch.arange(1, 9)
    expected = model(served.source.module, ids[None])[0]
    torch.testing.assert_close(served.run_level("fused", ids), expected, atol=1e-5, rtol=1e-5)


class NeedsCache(Causal):
    def forward(self, ids, num_past, position_ids):
        return self.logits(ids)


def test_what_a_module_needs_besides_is_named():
    with pytest.raises(CaptureError, match="takes num_past with every call"):
        compiled(NeedsCache())


class WantsCache(Causal):
    """Takes positions for its cache alone."""

    def forward(self, ids, input_pos=None):
        if input_pos is not None:
            raise TypeError("set_kv_cache() first")
        return self.logits(ids)


def test_positions_are_left_out_where_a_module_fails_with_them():
    served = compiled(WantsCache())
    ids = torch.arange(1, 9)
    expected = served.source.module(ids[None])[0]
    torch.testing.assert_close(served.run_level("fused", ids), expected, atol=1e-5, rtol=1e-5)


class Starts(Causal):
    def forward(self, ids, start_pos):
        return self.logits(ids) + start_pos


class Flat(Causal):
    """Takes ids [T] alone."""

    def forward(self, ids):
        (length,) = ids.shape
        return self.logits(ids[None])[0].view(length, -1)


@pytest.mark.parametrize(
    ("kind", "call"), [(Starts, lambda m, ids: m(ids[None], 0)[0]), (Flat, lambda m, ids: m(ids))]
)
def test_calls_of_another_kind(kind, call):
    served = compiled(kind(), verify="full")
    ids = torch.arange(1, 9)
    expected = call(served.source.module, ids)
    torch.testing.assert_close(served.run_level("fused", ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("forward", "call"),
    [
        (lambda ids, positions: 0, PlainCall()),
        (lambda ids, position_ids=None: 0, PlainCall()),
        (lambda ids, p=None: 0, PlainCall(is_guess=True)),
        (lambda *args: 0, PlainCall(is_guess=True)),
        (lambda ids, causal=True: 0, PlainCall(gives_positions=False)),
        (lambda ids, kv_cache=None, pos=None: 0, PlainCall(positions="pos")),
        (lambda ids, targets=None, **kwargs: 0, PlainCall(gives_positions=False)),
        (lambda mask=None, input_ids=None: 0, PlainCall(ids="input_ids", gives_positions=False)),
    ],
)  # fmt: skip
def test_how_a_signature_is_read(forward, call):
    module = nn.Module()
    module.forward = forward
    assert plain_call(module) == call
