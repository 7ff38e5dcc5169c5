"""Plain modules: which outputs are logits, and how many token ids there are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, RequestError, SamplingParams
from tests.frontend import plain_decoders as plain
from tests.frontend.plain_decoders import VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = [3, 31, 7]


class Returning(nn.Module):
    """A decoder whose forward returns something made of its logits; a table of 3 rows comes before its embedding."""

    def __init__(self, change=lambda logits: logits, num_rows: int = 3):
        super().__init__()
        self.change, self.segment = change, nn.Embedding(num_rows, 1)
        self.decoder = plain.Decoder(plain.MultiheadAttention)

    def forward(self, input_ids, position_ids):
        logits = self.decoder(input_ids, position_ids) + self.segment(position_ids % 2)
        return self.change(logits)


def compiled(model):
    return pagebinder.compile_model(model.eval(), CompileConfig(executable="eager"))


def greedy(model):
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


OUTPUTS = {
    "logits and a loss": lambda x: (x, x.mean()),
    "logits and no loss": lambda x: (x, None),
    "rows": lambda x: x[0],
    "list": lambda x: [x, x.argmax(-1)],
    "dict": lambda x: {"loss": None, "logits": x},
    "object": lambda x: SimpleNamespace(logits=x),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_logits_are_taken_from_what_forward_returns(name):
    torch.manual_seed(0)
    model = Returning(OUTPUTS[name])
    (answer,) = compiled(model).engine(EngineConfig(num_kv_blocks=16)).generate([PROMPT], GREEDY)
    model.change = lambda x: x
    assert list(answer.token_ids) == greedy(model)


# what -> (what forward makes of its logits, what is said)
NO_LOGITS = {
    "token ids": (lambda x: x.argmax(-1), r"returns int64 \[1, T\]"),
    "the first token's": (lambda x: x[:, [0]], r"returns float32 \[1, 1, 32\]"),
    "rows of its own": (lambda x: torch.cat((x[:, :2], x), 1), r"returns float32 \[1, T \+ 2, 32\]"),
    "a loss": (lambda x: (x.mean(), x), r"returns tuple of \(float32 \[\], float32 \[1, T, 32\]\)"),
    "hidden states": (lambda x: x[..., :16], r"returns float32 \[1, T, 16\], and there are 32 token ids"),
    "more than there are ids": (lambda x: torch.cat((x, x), -1), r"\[1, T, 64\], and there are 32 token ids"),
    "another dict": (lambda x: {"scores": x}, "returns dict with 'scores': no logits"),
    "nothing": (lambda x: None, "returns NoneType: no logits"),
    "an empty tuple": (lambda x: (), r"returns tuple of \(\): no logits"),
}


@pytest.mark.parametrize("name", NO_LOGITS)
def test_what_are_no_logits_is_told(name):
    change, message = NO_LOGITS[name]
    with pytest.raises(CaptureError, match=message):
        compiled(Returning(change))


@pytest.mark.parametrize("num_rows", [3, 512])
def test_there_are_as_many_ids_as_rows_that_ids_look_up(num_rows):
    served = compiled(Returning(num_rows=num_rows))
    assert served.source.vocab_size == VOCAB_SIZE
    engine = served.engine(EngineConfig(num_kv_blocks=16))
    assert len(engine.generate([[VOCAB_SIZE - 1]], GREEDY)[0].token_ids) == GREEDY.max_tokens
    with pytest.raises(RequestError, match=f"ids 0 to {VOCAB_SIZE - 1}"):
        engine.generate([[VOCAB_SIZE]], GREEDY)


def test_end_tokens_are_those_of_the_vocabulary_not_of_the_first_table():
    model = Returning()
    model.config = SimpleNamespace(eos_token_id=VOCAB_SIZE - 1)
    assert compiled(model).source.eos_token_ids == {VOCAB_SIZE - 1}


def test_a_config_says_how_many_ids_there_are():
    """The table may have more rows than there are tokens, and the head is as wide as a config says, or wider."""
    model = Returning(lambda x: x[..., :30])
    model.config = SimpleNamespace(vocab_size=29)
    assert compiled(model).source.vocab_size == 29
    model.config.vocab_size = 31
    with pytest.raises(
        CaptureError, match=r"\[1, T, 30\], and there are 31 token ids \(config\.vocab_size\)"
    ):
        compiled(model)


LOOK_UPS = {
    "index": lambda ids, table: table[ids],
    "functional": lambda ids, table: nn.functional.embedding(ids, table),
    "one-hot product": lambda ids, table: nn.functional.one_hot(ids, VOCAB_SIZE).to(table.dtype) @ table,
}


class WithoutEmbedding(nn.Module):
    """Looks its ids up by itself; one logit for each."""

    def __init__(self, look_up):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCAB_SIZE, plain.WIDTH))
        self.attention, self.look_up = plain.NanoGPT(), look_up

    def forward(self, input_ids, position_ids):
        x = self.look_up(input_ids, self.table)
        return (x + self.attention(x)) @ self.table.T


@pytest.mark.parametrize("name", LOOK_UPS)
def test_a_module_without_an_embedding(name):
    model = WithoutEmbedding(LOOK_UPS[name])
    served = compiled(model)
    assert served.source.vocab_size == VOCAB_SIZE
    (answer,) = served.engine(EngineConfig(num_kv_blocks=16)).generate([PROMPT], GREEDY)
    assert list(answer.token_ids) == greedy(model)
