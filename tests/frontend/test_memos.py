"""Tables that a model keeps by length are served; whatever is no such memo is refused as before."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.frontend.capture import capture
from pagebinder.frontend.length_limits import limit_of
from pagebinder.frontend.size_keys import KeyMayBeThere, SizeKey, SizeKeys
from pagebinder.frontend.source import source_from_module

VOCAB_SIZE, WIDTH, HEADS = 32, 32, 4
HEAD_DIM = WIDTH // HEADS
MANY_TOKENS = 64


def table(rotary, num_tokens):
    """cos and sin [T, D / 2]."""
    freqs = torch.outer(torch.arange(num_tokens).type_as(rotary.inv_freq), rotary.inv_freq)
    return freqs.cos(), freqs.sin()


class Rotary(nn.Module):
    """Subclasses say when it makes its tables."""

    def __init__(self):
        super().__init__()
        self.register_buffer(
            "inv_freq", 100.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), persistent=False
        )
        self.length, self.cos, self.sin, self.cache = None, None, None, {}

    def make(self, length):
        self.length = length
        self.cos, self.sin = table(self, length)

    def forward(self, x):
        return self.tables(x.shape[1], x)


@functools.cache
def kept_table(num_tokens, base=100.0):
    freqs = torch.outer(torch.arange(num_tokens), base ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    return freqs.cos(), freqs.sin()


class ByFunction(Rotary):
    def tables(self, length, x):
        return kept_table(length)


class OtherLength(Rotary):
    def tables(self, length, x):
        if length != self.length:
            self.make(length)
        return self.cos, self.sin


class Longer(Rotary):
    def __init__(self):
        super().__init__()
        self.length = 0

    def tables(self, length, x):
        if length > self.length:
            self.make(length)
        return self.cos[:length], self.sin[:length]


class TooShort(Rotary):
    def tables(self, length, x):
        if self.cos is None or self.cos.shape[0] < length:
            self.make(length)
        return self.cos[:length], self.sin[:length]


class InABuffer(Rotary):
    def __init__(self):
        super().__init__()
        self.register_buffer("both", None, persistent=False)

    def tables(self, length, x):
        if self.both is None or self.both.shape[1] < length:
            self.both = torch.stack(table(self, length))
        return self.both[:, :length].unbind()


class ByName(Rotary):
    def tables(self, length, x):
        if "cos" not in self.cache or self.cache["cos"].shape[0] < length:
            self.cache["cos"], self.cache["sin"] = table(self, length)
        return self.cache["cos"][:length], self.cache["sin"][:length]


class ByLength(Rotary):
    def tables(self, length, x):
        if (length, x.dtype) not in self.cache:
            self.cache[length, x.dtype] = table(self, length)
        return self.cache[length, x.dtype]


class InAList(Rotary):
    def __init__(self):
        super().__init__()
        self.held = [0, None]

    def tables(self, length, x):
        if self.held[0] != length:
            self.held = [length, table(self, length)]
        return self.held[1]


class InAnObject(Rotary):
    def __init__(self):
        super().__init__()
        self.held = SimpleNamespace(length=0, tables=None)

    def tables(self, length, x):
        if self.held.length != length:
            self.held.length, self.held.tables = length, table(self, length)
        return self.held.tables


class Shown(OtherLength):
    """Keeps what it computed for whoever wants to see it."""

    def __init__(self):
        super().__init__()
        self.shown = None

    def tables(self, length, x):
        self.shown = x * 2
        return super().tables(length, x)


class ByDistance(Longer):
    """Frequencies of longer sequences are others (dynamic NTK): what was made for those stays."""

    def make(self, length):
        self.length = length
        stretched = table(self, length)
        self.cos, self.sin = (t / math.sqrt(max(length / 16, 1)) for t in stretched)


class OfTheFirst(Rotary):
    """A factor of the first token that it ever saw at this length."""

    def tables(self, length, x):
        if length != self.length:
            self.make(length)
            self.cos = self.cos * x[0, 0, 0, 0]
        return self.cos, self.sin


class MadeOnce(Rotary):
    def tables(self, length, x):
        if self.cos is None:
            self.make(length)
        return self.cos[:length], self.sin[:length]


class Counting(OtherLength):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def tables(self, length, x):
        self.calls += 1
        return super().tables(length, x)


class Summing(Counting):
    def tables(self, length, x):
        self.calls += length
        return OtherLength.tables(self, length, x)


class LengthBefore(OtherLength):
    def __init__(self):
        super().__init__()
        self.before = None

    def tables(self, length, x):
        self.before = self.length
        return super().tables(length, x)


class Alternating(OtherLength):
    def tables(self, length, x):
        self.cache["turn"] = not self.cache.get("turn", False)
        return super().tables(length, x)


class Growing(Rotary):
    """Appends to the rows that are there."""

    def __init__(self):
        super().__init__()
        self.cos = self.sin = torch.zeros(0, HEAD_DIM // 2)

    def tables(self, length, x):
        have = self.cos.shape[0]
        if have < length:
            cos, sin = table(self, length)
            self.cos, self.sin = torch.cat([self.cos, cos[have:]]), torch.cat([self.sin, sin[have:]])
        return self.cos[:length], self.sin[:length]


class Filling(Rotary):
    """Writes into the tables that it has."""

    def __init__(self):
        super().__init__()
        self.length = 0
        self.cos, self.sin = torch.zeros(2, 512, HEAD_DIM // 2)

    def tables(self, length, x):
        if length != self.length:
            self.length = length
            self.cos[:length], self.sin[:length] = table(self, length)
        return self.cos[:length], self.sin[:length]


class Remembering(OtherLength):
    """Adds to the cosine what the last token of the call before was."""

    def __init__(self):
        super().__init__()
        self.last = torch.zeros(HEAD_DIM // 2)

    def tables(self, length, x):
        cos, sin = super().tables(length, x)
        cos, self.last = cos + self.last, x[0, -1, 0, ::2]
        return cos, sin


class Layer(nn.Module):
    def __init__(self, rotary, keeps_mask=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rotary, self.keeps_mask, self.mask = rotary, keeps_mask, None

    def forward(self, x):
        length = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        cos, sin = (t[None, :, None] for t in self.rotary(q))
        q, k, v = (y.transpose(1, 2) for y in (rotated(q, cos, sin), rotated(k, cos, sin), v))
        if not self.keeps_mask:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            if self.mask is None or self.mask.shape[0] < length:
                self.mask = torch.triu(torch.ones(length, length), diagonal=1).bool()
            scores = (q @ k.mT / HEAD_DIM**0.5).masked_fill(self.mask[:length, :length], -torch.inf)
            y = scores.softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Decoder(nn.Module):
    def __init__(self, rotary, keeps_mask=False, is_shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Linear(WIDTH, VOCAB_SIZE)
        shared = rotary()
        self.layers = nn.ModuleList(Layer(shared if is_shared else rotary(), keeps_mask) for _ in range(2))
        self.eval()

    def forward(self, idx):
        x = self.embed(idx)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


SERVED = [OtherLength, Longer, TooShort, InABuffer, ByName, ByLength, InAList, InAnObject, Shown]
REFUSED = [
    ByDistance, OfTheFirst, MadeOnce, Counting, Summing, LengthBefore, Alternating, Filling, Remembering,
]  # fmt: skip


def ran_with(model, *lengths):
    with torch.no_grad():
        for length in lengths:
            model(torch.zeros(1, length, dtype=torch.int64))
    return model


def held(model):
    """What its modules hold, by identity."""
    return [
        (name, key, id(value), list(value.items()) if isinstance(value, dict) else None)
        for name, m in model.named_modules()
        for key, value in {**vars(m), **m._buffers}.items()
        if not key.startswith("_")
    ]


def assert_served(model):
    """Up to any length, and token for token as the module itself continues."""
    config = CompileConfig(executable="eager", providers={"paged_attention": "reference"})
    before = held(model)
    compiled = pagebinder.compile_model(model, config)
    assert held(model) == before
    assert limit_of(compiled.graphs["captured"].graph) is None
    prompts = [[3, 31, 7], [5] * 9, [4, 8]]
    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    for prompt, output in zip(prompts, engine.generate(prompts, params)):
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert list(output.token_ids) == ids[len(prompt) :]


@pytest.mark.parametrize("rotary", SERVED)
def test_tables_by_length_are_served(rotary):
    assert_served(Decoder(rotary))


@pytest.mark.parametrize("lengths", [(), (12,)], ids=["fresh", "filled"])
def test_tables_that_a_function_keeps_are_served_and_stay_values(lengths):
    kept_table.cache_clear()
    assert_served(ran_with(Decoder(ByFunction), *lengths))
    assert all(t.device.type == "cpu" for n in (12, 40, MANY_TOKENS) for t in kept_table(n))


@pytest.mark.parametrize("lengths", [(1,), (40,), (MANY_TOKENS, 5)], ids=str)
@pytest.mark.parametrize("rotary", SERVED)
def test_they_are_whatever_calls_have_filled_them_with(rotary, lengths):
    model = ran_with(Decoder(rotary), *lengths)
    before = held(model)
    gm, route = capture(source_from_module(model))
    assert route == "export" and limit_of(gm.graph) is None and held(model) == before
    ids = torch.randint(VOCAB_SIZE, (MANY_TOKENS + 9,))
    with torch.no_grad():
        torch.testing.assert_close(gm(ids, torch.arange(len(ids))), model(ids[None])[0])


@pytest.mark.parametrize("lengths", [(), (12,)], ids=["fresh", "filled"])
def test_masks_that_are_made_again_when_they_are_too_short_are_served(lengths):
    assert_served(ran_with(Decoder(Longer, keeps_mask=True, is_shared=True), *lengths))


@pytest.mark.parametrize("lengths", [(), (12,), (40,)], ids=["fresh", "filled", "filled as traced"])
@pytest.mark.parametrize("rotary", REFUSED)
def test_what_is_no_memo_is_refused(rotary, lengths):
    model = ran_with(Decoder(rotary), *lengths)
    before = held(model)
    try:
        gm, _ = capture(source_from_module(model))
    except CaptureError:
        assert held(model) == before
        return
    # One that is filled may end there, as it would without memos.
    assert limit_of(gm.graph).num_tokens == max(lengths)


def test_tables_that_are_made_of_the_old_ones_are_refused():
    """Once there are some; at first there is nothing to read."""
    assert_served(Decoder(Growing))
    with pytest.raises(CaptureError, match="another tensor -> another tensor"):
        capture(source_from_module(ran_with(Decoder(Growing), 12)))


def test_the_refusal_is_that_of_python_state():
    with pytest.raises(CaptureError, match=r"rotary\.calls \(0 -> 1\)"):
        capture(source_from_module(Decoder(Counting)))


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = Decoder(OtherLength)
    with pytest.raises(CaptureError, match="changes attributes in Python"):
        capture(source_from_module(model))


def test_a_traced_number_is_not_taken_for_one_that_may_be_equal():
    keys = SizeKeys({SizeKey("T"): 1, "name": 2})
    assert "name" in keys and "other" not in keys and SizeKey("T") in keys
    for key in (5, SizeKey("T + 1")):
        with pytest.raises(KeyMayBeThere):
            key in keys  # noqa: B015
    of_layers = SizeKeys({(SizeKey("T"), 0): 1})
    assert (SizeKey("T"), 1) not in of_layers
    with pytest.raises(KeyMayBeThere):
        of_layers.get((7, 0))
