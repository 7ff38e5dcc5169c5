"""Models that keep K and V in tensors of their own are served from the engine's cache instead."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from tests.frontend.plain_decoders import VOCAB_SIZE, WIDTH

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 2, 3] * 6, [4, 5], [6]]
HEADS, LONGEST = 4, 64


class Cached(nn.Module):
    """A layer of attention with caches [B, S, H, D], as published with weights. `kind`: how they are kept."""

    def __init__(self, kind="attribute", dtype=torch.float32, sequences=1):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        for name in ("cache_k", "cache_v"):
            cache = torch.randn(sequences, LONGEST, HEADS, WIDTH // HEADS).to(dtype)
            if kind == "attribute":
                setattr(self, name, cache)
            else:
                self.register_buffer(name, cache, persistent=False)

    def forward(self, x, start, mask):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).unbind(2)
        k, v = self.keep(batch, start, length, k, v)
        scores = torch.einsum("bshd,bthd->bhst", q, k.to(q)) / math.sqrt(q.shape[-1])
        scores = scores if mask is None else scores + mask
        y = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v.to(q))
        return self.out(y.flatten(2))

    def keep(self, batch, start, length, k, v):
        self.cache_k[:batch, start : start + length] = k
        self.cache_v[:batch, start : start + length] = v
        return self.cache_k[:batch, : start + length], self.cache_v[:batch, : start + length]


class OnDevice(Cached):
    def keep(self, batch, start, length, k, v):
        self.cache_k, self.cache_v = self.cache_k.to(k), self.cache_v.to(v)
        return super().keep(batch, start, length, k, v)


class Copies(Cached):
    def keep(self, batch, start, length, k, v):
        self.cache_k[0].narrow(0, start, length).copy_(k[0])
        self.cache_v[0, start : start + length].copy_(v[0])
        return self.cache_k[0, : start + length][None], self.cache_v[0, : start + length][None]


class Decoder(nn.Module):
    """forward(tokens, start_pos) -> logits [1, T, V]"""

    def __init__(self, *layers):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.layers = nn.Embedding(VOCAB_SIZE, WIDTH), nn.ModuleList(layers)
        self.places = torch.randn(2 * LONGEST, WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB_SIZE)

    @torch.inference_mode()
    def forward(self, tokens, start_pos: int):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places[start_pos : start_pos + length]
        mask = None
        if length > 1:
            mask = torch.full((length, length), -torch.inf).triu(1)
            mask = torch.hstack([torch.zeros(length, start_pos), mask]).type_as(x)
        for layer in self.layers:
            x = x + layer(x, start_pos, mask)
        return self.out(x) * 3


def compiled(*layers, **options):
    return pagebinder.compile_model(Decoder(*layers).eval(), CompileConfig(executable="eager", **options))


def greedy(model, ids):
    """With the model's own caches, as its makers generate."""
    logits, new = model(torch.tensor([ids]), 0), []
    for _ in range(GREEDY.max_tokens):
        new.append(int(logits[0, -1].argmax()))
        logits = model(torch.tensor([new[-1:]]), len(ids) + len(new) - 1)
    return new


KINDS = {
    "attributes": lambda: [Cached(), Cached()],
    "buffers": lambda: [Cached("buffer"), Cached("buffer")],
    "of several sequences": lambda: [Cached(sequences=3)],
    "in 16 bits": lambda: [Cached(dtype=torch.bfloat16)],
    "moved when they are used": lambda: [OnDevice(), OnDevice("buffer")],
    "one sequence": lambda: [Copies()],
}


@pytest.mark.parametrize("name", KINDS)
def test_served_from_the_engines_cache(name):
    served = compiled(*KINDS[name](), verify="sample")
    before = [layer.cache_k.clone() for layer in served.source.module.layers]
    assert not any("cache" in str(n.target) for n in served.graphs["captured"].graph.nodes)
    engine = served.engine(EngineConfig(num_kv_blocks=32, max_num_batched_tokens=8))
    tokens = [list(o.token_ids) for o in engine.generate(PROMPTS, GREEDY)]
    assert all(torch.equal(a, b.cache_k) for a, b in zip(before, served.source.module.layers))
    assert tokens == [greedy(served.source.module, ids) for ids in PROMPTS]
    assert served.max_model_len == LONGEST


class ReadsMore(Cached):
    """The row behind what it wrote."""

    def keep(self, batch, start, length, k, v):
        k, v = super().keep(batch, start, length, k, v)
        return k + self.cache_k[:batch, length : length + 1].mean(), v


class ReadsBefore(Cached):
    def keep(self, batch, start, length, k, v):
        old = self.cache_v[:batch, : start + length].clone()
        k, v = super().keep(batch, start, length, k, v)
        return k, v + old


class WritesPart(Cached):
    """Keys of half of its heads."""

    def keep(self, batch, start, length, k, v):
        self.cache_k[:batch, start : start + length, : HEADS // 2] = k[:, :, : HEADS // 2]
        return self.cache_k[:batch, : start + length], v


class WritesElsewhere(Cached):
    def keep(self, batch, start, length, k, v):
        self.cache_k[:batch, start + 1 : start + length + 1] = k
        return self.cache_k[:batch, : start + length], v


class Sums(Cached):
    def keep(self, batch, start, length, k, v):
        self.cache_k[:batch, start : start + length] += k
        return self.cache_k[:batch, : start + length], v


@pytest.mark.parametrize("kind", ["attribute", "buffer"])
@pytest.mark.parametrize("layer", [ReadsMore, ReadsBefore, WritesPart, WritesElsewhere, Sums])
def test_what_was_there_before_is_not_read(layer, kind):
    with pytest.raises(CaptureError, match=r"held before is read|relates tokens"):
        compiled(layer(kind))
