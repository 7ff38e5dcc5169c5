"""Models whose code looks at the length: served where it makes no difference, for as many tokens as they take."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pagebinder
from pagebinder import CaptureError, CompileConfig, ConfigError, EngineConfig, SamplingParams
from pagebinder.frontend import capture
from tests.frontend.plain_decoders import VOCAB_SIZE, WIDTH

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 2, 3] * 20, [4, 5], [6], [7, 8, 9]]
LONGEST, WINDOW = 128, 24


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Windowed(Layer):
    """Without a mask as long as the window holds all; `scale`: of queries there."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def attend(self, q, k, v):
        if q.shape[2] <= WINDOW:
            return F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < WINDOW))


class Decoder(nn.Module):
    """`change`: of what is embedded, given it and the number of tokens."""

    def __init__(self, layer=Layer, change=lambda x, length: x):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers, self.out = nn.ModuleList([layer(), layer()]), nn.Linear(WIDTH, VOCAB_SIZE)
        self.change = change

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        x = self.change(x, input_ids.shape[1])
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x) * 3


def compiled(*args, **options):
    return pagebinder.compile_model(Decoder(*args).eval(), CompileConfig(executable="eager", **options))


def greedy(model, ids):
    ids = list(ids)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-GREEDY.max_tokens :]


def require_same_tokens(served):
    engine = served.engine(EngineConfig(num_kv_blocks=64, max_num_batched_tokens=8))
    tokens = [list(o.token_ids) for o in engine.generate(PROMPTS, GREEDY)]
    assert tokens == [greedy(served.source.module, ids) for ids in PROMPTS]
    assert served.max_model_len == LONGEST


HARMLESS = {
    "not for two tokens": lambda x, length: x if length == 2 else x * 1.0,
    "from three tokens on": lambda x, length: x if length < 3 else x + 0.0,
    "not for ten": lambda x, length: x if length == 10 else x * 1.0,
    "not for every eighth": lambda x, length: x if length % 8 == 0 else x * 1.0,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_branches_on_few_tokens_that_change_nothing(name):
    served = compiled(Layer, HARMLESS[name])
    require_same_tokens(served)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_branches_on_few_tokens_that_change_something_are_refused(num_tokens):
    with pytest.raises(CaptureError, match="a single token than for more|2 tokens than for more"):
        compiled(Layer, lambda x, length: -x if length == num_tokens else x)


OTHERS = {
    "sixty": lambda length: length == 60,
    "some": lambda length: length in range(70, 80),
    "multiples": lambda length: length % 50 == 0,
    "quotients": lambda length: length // 40 == 2,
}


@pytest.mark.parametrize("name", OTHERS)
def test_branches_on_lengths_in_between_that_change_something_are_refused(name):
    with pytest.raises(CaptureError, match=r"\d\d tokens than for more"):
        compiled(Layer, lambda x, length: x * 2 if OTHERS[name](length) else x)


@pytest.mark.parametrize("name", OTHERS)
def test_branches_on_lengths_in_between_that_change_nothing(name):
    require_same_tokens(compiled(Layer, lambda x, length: x if OTHERS[name](length) else x * 1.0))


def test_a_branch_that_all_longer_sequences_take_is_a_limit():
    change = lambda x, length: x * 2 if length * length > 2500 else x  # noqa: E731
    with pytest.raises(ConfigError, match="50 tokens that the captured graph holds for"):
        compiled(Layer, change, max_model_len=LONGEST)
    assert compiled(Layer, change).max_model_len == 50


def test_a_graph_that_cannot_run_with_a_single_token_is_refused():
    halves = lambda x, length: torch.cat([h * (k + 1) for k, h in enumerate(x.chunk(2, 1))], 1)  # noqa: E731
    with pytest.raises(CaptureError, match="for a single token that the graph of more cannot"):
        compiled(Layer, halves)


def test_a_window_that_is_not_looked_at_while_it_holds_all():
    served = compiled(Windowed, verify="sample")
    assert {state.window for state in served.states} == {WINDOW}
    assert f"from {WINDOW + 1}" in served.report.capture_route
    require_same_tokens(served)


def test_another_computation_for_short_sequences_is_refused():
    with pytest.raises(CaptureError, match="tokens than for more|how many tokens"):
        compiled(lambda: Windowed(2.0))


class Table(nn.Module):
    """No nn.Embedding, which would say how many ids there are."""

    def __init__(self, table):
        super().__init__()
        self.weight = table.weight

    def forward(self, ids):
        return self.weight[ids]


class OfOtherTokens(Decoder):
    """Turns what it says of few tokens, but not of token 0; its table of positions is declared first."""

    def __init__(self, num_tokens, table=None):
        super().__init__()
        places, tokens = self.places, self.tokens
        del self.places, self.tokens
        self.places, self.tokens, self.num_tokens = places, tokens, num_tokens
        if table is not None:
            self.places, self.tokens = table(places), table(tokens)

    def forward(self, input_ids):
        logits = super().forward(input_ids)
        if input_ids.shape[1] != self.num_tokens:
            return logits
        return torch.where((input_ids == 0).all(), logits, -logits)


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("table", [None, Table])
def test_few_tokens_are_others_than_the_first(num_tokens, table):
    with pytest.raises(CaptureError, match="a single token than for more|2 tokens than for more"):
        pagebinder.compile_model(OfOtherTokens(num_tokens, table).eval(), CompileConfig(executable="eager"))


def test_a_graph_that_torch_cannot_make_functional_is_refused(monkeypatch):
    """As of a mask that torch.vmap made within the traced code."""

    def fail(program):
        raise RuntimeError("a tensor escaped")

    monkeypatch.setattr(capture, "_functional", fail)
    with pytest.raises(CaptureError, match="export from 3 tokens: RuntimeError: a tensor escaped"):
        compiled()


class Grown(Decoder):
    """Makes its table as long as its longest sequence needs."""

    def __init__(self):
        super().__init__()
        self.sines = None

    def forward(self, input_ids):
        length = input_ids.shape[1]
        if self.sines is None or len(self.sines) < length:
            self.sines = torch.sin(torch.arange(length)[:, None] * torch.ones(WIDTH))
        x = self.tokens(input_ids) + self.sines[:length]
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x) * 3


def test_looking_for_more_tokens_leaves_the_model_as_it_was():
    model = Grown().eval()
    model(torch.zeros(1, 60, dtype=torch.int64))
    served = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    assert len(model.sines) == 60 and served.max_model_len >= 60
