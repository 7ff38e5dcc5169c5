"""Tokens that are mixed with those before them, written as the first ones and the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from tests.frontend import plain_decoders as plain
from tests.frontend.plain_decoders import VOCAB_SIZE, WIDTH

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 2, 3] * 6, [4, 5], [6, 7, 8]]


class Smears(nn.Module):
    """forward(idx): what is embedded is mixed with its neighbours by `smear(model, x)`."""

    def __init__(self, smear):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(64, WIDTH)
        self.gate, self.layers = nn.Linear(8, 1, bias=False), nn.ModuleList([plain.NanoGPT(), plain.MinGPT()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.smear = smear

    def forward(self, idx):
        x = self.smear(self, self.tokens(idx) + self.places(torch.arange(idx.shape[1])))
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(x) * 3


def compiled(smear, **options):
    return pagebinder.compile_model(Smears(smear).eval(), CompileConfig(executable="eager", **options))


def greedy(model, ids):
    ids = list(ids)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-GREEDY.max_tokens :]


def gated(m, x):
    return torch.cat([x[:, :1], x[:, 1:] + torch.sigmoid(m.gate(x[:, 1:, :8])) * x[:, :-1]], dim=1)


SMEARS = {
    "with a gate": gated,
    "by its number of rows": lambda m, x: torch.cat([x[:, :1], x[:, 1:] - x[:, : x.shape[1] - 1]], 1),
    "two rows": lambda m, x: torch.cat((x[:, :2], (x[:, 2:] * 2 + x[:, :-2]).tanh()), -2),
    "without the row before": lambda m, x: torch.cat([x[:, :1], x[:, 1:].cos()], 1),
    "in rows of one sequence": lambda m, x: torch.cat([x[0, :1], x[0, 1:] * x[0, :-1]])[None],
}


@pytest.mark.parametrize("name", SMEARS)
def test_rows_are_mixed_with_those_before(name):
    served = compiled(SMEARS[name], verify="sample")
    result = next(p for p in served.report.passes if p.name == "recognise_first_rows")
    assert len(result.matches) == 1
    engine = served.engine(EngineConfig(num_kv_blocks=32, max_num_batched_tokens=5))
    tokens = [list(o.token_ids) for o in engine.generate(PROMPTS, GREEDY)]
    assert tokens == [greedy(served.source.module, ids) for ids in PROMPTS]


OTHERS = {
    "rows behind it": lambda m, x: torch.cat([x[:, :-1] + x[:, 1:], x[:, -1:]], 1),
    "sums of rows": lambda m, x: torch.cat([x[:, :1], x[:, 1:].cumsum(1)], 1),
    "rows turned round": lambda m, x: torch.cat([x[:, :1], x[:, 1:].flip(1)], 1),
    "a softmax over rows": lambda m, x: torch.cat([x[:, :1], x[:, 1:].softmax(1)], 1),
    "attention among the others": lambda m, x: torch.cat(
        [
            x[:, :1],
            F.scaled_dot_product_attention(x[:, None, 1:], x[:, None, 1:], x[:, None, 1:], is_causal=True)[
                :, 0
            ],
        ],
        1,
    ),
    "a product of rows": lambda m, x: torch.cat([x[:, :1], x[:, 1:] @ (x[:, 1:].mT @ x[:, 1:])], 1),
    "the mean of all": lambda m, x: torch.cat([x[:, :1], x[:, 1:] + x.mean(1, keepdim=True)], 1),
    "every second row": lambda m, x: torch.cat([x[:, :1], x[:, 1:] + x.repeat(1, 2, 1)[:, 2::2]], 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_mixtures_of_rows_are_refused(name):
    with pytest.raises(
        CaptureError, match="relates tokens|depends on that number|how many tokens|than for more"
    ):
        compiled(OTHERS[name])
