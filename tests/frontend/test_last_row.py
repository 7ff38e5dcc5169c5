"""Models that return the last token's logits alone are served as if they returned all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from tests.frontend import plain_decoders as plain
from tests.frontend.plain_decoders import VOCAB_SIZE, WIDTH

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 2, 3] * 6, [4, 5], [6]]


class LastRow(nn.Module):
    """forward(idx, targets=None) -> (logits, loss), as in lessons: without targets of the last token."""

    def __init__(self, last):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([plain.NanoGPT(), plain.MinGPT()])
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.last = last

    def head(self, x):
        return self.out(x) * 3

    def forward(self, idx, targets=None):
        assert idx.shape[1] <= 64
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return (self.last(self, x) if targets is None else self.head(x)), None


def compiled(last, **options):
    return pagebinder.compile_model(LastRow(last).eval(), CompileConfig(executable="eager", **options))


def greedy(model, ids):
    ids = list(ids)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            logits, _ = model(torch.tensor([ids]))
            ids.append(int(logits.reshape(-1, VOCAB_SIZE)[-1].argmax()))
    return ids[-GREEDY.max_tokens :]


LAST = {
    "in a list": lambda m, x: m.head(x[:, [-1], :]),
    "a slice": lambda m, x: m.head(x[:, -1:]),
    "selected": lambda m, x: m.head(x[:, -1]),
    "of the first sequence": lambda m, x: m.head(x[0, -1]),
    "by its number": lambda m, x: m.head(x[:, x.shape[1] - 1 :]),
    "selected by its number": lambda m, x: m.head(x[:, x.shape[1] - 1]),
    "narrowed": lambda m, x: m.head(x.narrow(1, x.shape[1] - 1, 1)),
    "of logits": lambda m, x: m.head(x)[:, -1, :],
    "asked for one length": lambda m, x: m.head(x[:, -1:] if x.shape[1] == 7 else x[:, -1:] * 1.0),
    "with a soft cap behind": lambda m, x: torch.tanh(m.head(x[:, -1:]) / 30) * 30,
}


@pytest.mark.parametrize("name", LAST)
def test_every_token_gets_the_last_ones_logits(name):
    served = compiled(LAST[name], verify="sample")
    rows = served.graphs["captured"](torch.arange(9), torch.arange(9))
    with torch.no_grad():
        alone = [served.source.module(torch.arange(n + 1)[None])[0].reshape(1, -1) for n in range(9)]
    torch.testing.assert_close(rows, torch.cat(alone))
    engine = served.engine(EngineConfig(num_kv_blocks=32, max_num_batched_tokens=8))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [greedy(served.source.module, ids) for ids in PROMPTS]
    assert served.max_model_len == 64 and "the last token's logits" in str(served.explain())


def test_verified_in_full():
    lines = compiled(LAST["in a list"], verify="full").report.verified
    assert {line.name for line in lines} >= {"capture"} and {line.weights for line in lines} == {
        "model",
        "rescaled",
    }


OTHERS = {
    "the first row": lambda m, x: m.head(x[:, :1]),
    "the one before": lambda m, x: m.head(x[:, -2:-1]),
    "a mean": lambda m, x: m.head(x.mean(1)),
    "two rows": lambda m, x: m.head(x[:, -2:]),
    "mixed with a mean": lambda m, x: m.head(x[:, -1:] + x.mean(1, keepdim=True)),
    "mixed with the first": lambda m, x: m.head(x[:, -1:] + x[:, :1]),
    "mixed with the one before": lambda m, x: m.head(x[:, -1:] + x[:, -2:-1]),
    "rows mixed behind": lambda m, x: m.head(x[:, -1:]).softmax(1),
    "one of two": lambda m, x: m.head(torch.cat([x, x], 1)[:, -1:]),
    "a size written for one": lambda m, x: m.head(x[:, -1:].reshape(WIDTH)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_rows_are_refused(name):
    with pytest.raises(
        CaptureError, match="must return logits|relates tokens|the last token alone, and computes"
    ):
        compiled(OTHERS[name])


class SaysTwo(LastRow):
    """Behind torch's back its last row is not what a longer call gives for that token."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return logits + (idx.shape[1] > 20), loss


def test_a_last_row_that_depends_on_the_length_is_refused():
    with pytest.raises(CaptureError, match="number of tokens|how many tokens|20"):
        pagebinder.compile_model(SaysTwo(LAST["in a list"]).eval(), CompileConfig(executable="eager"))
