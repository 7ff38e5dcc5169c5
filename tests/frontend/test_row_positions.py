"""Numbers of rows that a model counts itself become positions; other uses of the number of tokens are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.frontend.capture import capture
from pagebinder.frontend.recognise.row_positions import recognise_row_positions
from pagebinder.frontend.source import source_from_module
from pagebinder.graph_tools import calls
from tests.frontend import plain_decoders as plain
from tests.frontend.plain_decoders import VOCAB_SIZE, WIDTH
from tests.helpers import tiny_llama4
from tests.zoo.architectures import architectures
from tests.zoo.tiny_configs import tiny_model

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 2, 3] * 6, [4, 5]]


class CountsRows(nn.Module):
    """As people write small decoders: forward(idx, targets=None) -> (logits, loss), positions by arange."""

    def __init__(self, count, num_rows=64):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(num_rows, WIDTH)
        self.layers = nn.ModuleList([plain.NanoGPT(), plain.MinGPT()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.count = count

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.positions(self.count(idx))
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(x) * 3, None


def compiled(count, **options):
    return pagebinder.compile_model(CountsRows(count).eval(), CompileConfig(executable="eager", **options))


def greedy(model, ids):
    ids = list(ids)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
    return ids[-GREEDY.max_tokens :]


# what -> (how rows are counted, the most tokens that a table of 64 rows and a mask of 64 allow)
COUNTS = {
    "arange": (lambda ids: torch.arange(ids.shape[1]), 64),
    "of int32, in a batch": (lambda ids: torch.arange(0, ids.size(1), dtype=torch.int32)[None], 64),
    "of floats": (lambda ids: torch.arange(ids.shape[1], dtype=torch.float32).long(), 64),
    "from 1": (lambda ids: torch.arange(1, ids.shape[1] + 1), 63),
    "even": (lambda ids: torch.arange(0, 2 * ids.shape[1], 2), 32),
    "sums of ones": (lambda ids: torch.ones_like(ids).cumsum(1) - 1, 64),
    "sums of a mask of ones": (lambda ids: torch.ones_like(ids, dtype=torch.bool).long().cumsum(-1) - 1, 64),
}


@pytest.mark.parametrize("name", COUNTS)
def test_rows_are_positions_in_every_step(name):
    count, longest = COUNTS[name]
    served = compiled(count, verify="sample")
    assert served.max_model_len == longest
    result = next(p for p in served.report.passes if p.name == "recognise_row_positions")
    assert len(result.matches) == 1
    engine = served.engine(EngineConfig(num_kv_blocks=32, max_num_batched_tokens=8))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [greedy(served.source.module, ids) for ids in PROMPTS]


class CutsTable(CountsRows):
    """As people write them, too: a table cut to the length."""

    def __init__(self, cut):
        super().__init__(None)
        self.register_buffer("numbers", torch.arange(64)[None])
        self.register_buffer("sines", torch.randn(1, 64, WIDTH), persistent=False)
        self.cut = cut

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.cut(self, idx.shape[1])
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(x) * 3, None


# what -> (what is added, the most tokens)
CUTS = {
    "of a parameter": (lambda m, n: m.positions.weight[:n], 64),
    "of a buffer, in a batch": (lambda m, n: m.sines[:, :n], 64),
    "from the third row": (lambda m, n: m.sines[:, 2 : n + 2], 62),
    "of numbers": (lambda m, n: m.positions(m.numbers[:, :n]), 64),
    "of what is made of it": (lambda m, n: (m.sines[0].sin() * 2)[0:n], 64),
}


@pytest.mark.parametrize("name", CUTS)
def test_rows_of_a_table_that_is_cut_to_the_length(name):
    cut, longest = CUTS[name]
    served = pagebinder.compile_model(
        CutsTable(cut).eval(), CompileConfig(executable="eager", verify="sample")
    )
    assert served.max_model_len == longest
    engine = served.engine(EngineConfig(num_kv_blocks=32, max_num_batched_tokens=8))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [list(o.token_ids) for o in outputs] == [greedy(served.source.module, ids) for ids in PROMPTS]


class LooksUp(CutsTable):
    """As rotary embeddings were written for long: a table cut to the length, then looked up by positions."""

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.cut(self.sines[0, : input_ids.shape[1]], position_ids)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(x) * 3


def greedy_given_positions(model, ids):
    ids = list(ids)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])
            ids.append(int(logits[0, -1].argmax()))
    return ids[-GREEDY.max_tokens :]


LOOK_UPS = {
    "indexed": lambda rows, p: rows[p],
    "behind casts": lambda rows, p: rows.double().to(torch.float32).sin()[p.to(torch.int32).long()],
    "in another dimension": lambda rows, p: rows.transpose(0, 1)[:, p].permute(1, 2, 0),
    "by one row of positions": lambda rows, p: rows[p[0]],
    "embedding": lambda rows, p: nn.functional.embedding(p, rows),
    "index_select": lambda rows, p: rows.index_select(0, p.view(-1)),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_rows_of_a_cut_table_by_positions(name):
    served = pagebinder.compile_model(
        LooksUp(LOOK_UPS[name]).eval(), CompileConfig(executable="eager", verify="sample")
    )
    engine = served.engine(EngineConfig(num_kv_blocks=32, max_num_batched_tokens=8))
    tokens = [list(o.token_ids) for o in engine.generate(PROMPTS, GREEDY)]
    assert tokens == [greedy_given_positions(served.source.module, ids) for ids in PROMPTS]


@pytest.mark.parametrize(
    "cut",
    [
        lambda rows, p: rows[p.flip(1)],
        lambda rows, p: rows[(p + 1) % p.shape[1]],
        lambda rows, p: rows[p * 0],
        lambda rows, p: rows[p.clamp(max=2)],
        lambda rows, p: rows[p[:, :1]],
        lambda rows, p: rows[p.to(torch.int32).float().mul(0.5).long()],
    ],
)
def test_rows_of_a_cut_table_by_other_numbers_are_refused(cut):
    with pytest.raises(CaptureError, match="relates tokens"):
        pagebinder.compile_model(LooksUp(cut).eval(), CompileConfig(executable="eager"))


class ShortTable(CutsTable):
    """As in lessons, with masks as long as the table."""

    def __init__(self, length):
        super().__init__(lambda m, n: m.sines[:, :n])
        self.sines = self.sines[:, :length]
        nano, mini = self.layers
        nano.tril, mini.bias = nano.tril[:, :, :length, :length], mini.bias[:length, :length]


@pytest.mark.parametrize("length", [9, 32])
def test_tables_that_are_shorter_than_what_is_traced(length):
    served = pagebinder.compile_model(
        ShortTable(length).eval(), CompileConfig(executable="eager", block_size=8)
    )
    assert served.max_model_len == length
    engine = served.engine(EngineConfig(num_kv_blocks=32))
    outputs = engine.generate([[1, 2, 3]], GREEDY)
    assert list(outputs[0].token_ids) == greedy(served.source.module, [1, 2, 3])


CUT_OTHERWISE = {
    "its last rows": lambda m, n: m.sines[:, -n:],
    "from the end": lambda m, n: m.sines[:, :n].flip(1),
    "every other row": lambda m, n: m.sines[:, : 2 * n : 2],
}


@pytest.mark.parametrize("name", CUT_OTHERWISE)
def test_other_rows_of_a_table_are_refused(name):
    with pytest.raises(CaptureError):
        pagebinder.compile_model(CutsTable(CUT_OTHERWISE[name]).eval(), CompileConfig(executable="eager"))


def scaled_by_position(name: str) -> nn.Module:
    """A model of transformers whose attention scales queries by their row number, here from 8 tokens on."""
    if name == "llama4":
        return tiny_llama4(no_rope_layers=[0] * 4, layer_types=["full_attention"] * 4)
    found = next((a for a in architectures("causal") if a.name == name), None)
    if found is None:
        pytest.skip(f"this release of transformers has no {name}")
    return tiny_model(found)


@pytest.mark.parametrize("name", ["llama4", "inkling_text"])
def test_scales_of_queries_follow_positions(name):
    """The same tokens later in a sequence get other logits."""
    model = scaled_by_position(name)
    semantic = capture(source_from_module(model))[0]
    assert recognise_row_positions(semantic).matches
    assert not list(calls(semantic.graph, torch.ops.aten.arange.default))
    ids = torch.arange(20)
    with torch.no_grad():
        first, later = (semantic(ids, torch.arange(begin, begin + 20)) for begin in (0, 45))
        expected = model(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
    assert (later - first).abs().max() > 1e-3


REFUSED = {
    "from the end": (lambda ids: ids.shape[1] - 1 - torch.arange(ids.shape[1]), "number of tokens"),
    "flipped": (lambda ids: torch.arange(ids.shape[1]).flip(0), "along the token dimension"),
    "of another row": (
        lambda ids: torch.arange(ids.shape[1])[torch.arange(ids.shape[1])],
        "depends on tokens",
    ),
    "of 16 bits from 1": (
        lambda ids: torch.arange(1, ids.shape[1] + 1, dtype=torch.bfloat16).long(),
        "counts the tokens of the batch",
    ),
    "halves": (lambda ids: torch.arange(0.5, ids.shape[1] + 0.5).long(), "cuts or extends the token"),
    "sums of twos": (lambda ids: torch.full_like(ids, 2).cumsum(1) - 2, "along the token dimension"),
    "sums of ids": (lambda ids: (ids > 2).cumsum(1), "along the token dimension"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_uses_of_the_number_of_tokens_are_refused(name):
    count, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        compiled(count)
