"""Branches by values of weights: the trace takes the model's way; by values of anything else they are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.frontend.capture import capture
from pagebinder.frontend.source import source_from_module
from pagebinder.frontend.weight_values import decisions_of

VOCAB_SIZE, WIDTH, HEADS, ROWS = 32, 32, 4, 64
PLACE = r"test_weight_values\.py:\d+"


class Decoder(nn.Module):
    """One layer of attention; `body(model, x, positions)` comes before it."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Linear(WIDTH, VOCAB_SIZE)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.alpha = nn.Parameter(torch.tensor(-0.5))
        self.register_buffer("table", torch.randn(ROWS, WIDTH))
        self.register_buffer("count", torch.tensor(7))
        self.plain = torch.tensor([0.25, 2.0])  # no buffer
        self.body = body
        self.eval()

    def forward(self, input_ids, position_ids):
        x = self.body(self, self.embed(input_ids), position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2))


def table_if_filled(m, x, positions):
    if m.table[0, 0] == 0:
        return x
    return x + m.table[positions]


def sign(m, x, positions):
    return x * 2 if m.alpha.item() > 0 else x * 3


def as_a_number(m, x, positions):
    return x + float(m.alpha) * m.count.item()


def asserted(m, x, positions):
    assert not torch.isnan(m.qkv.weight).any() and torch.isfinite(m.table).all()
    return x + 1


def rows_of(m, x, positions):
    return x + m.table[: int(m.count)].mean(0)


def listed(m, x, positions):
    return x * 2 if max(m.table[0].tolist()) > 0 else x


def without_a_buffer(m, x, positions):
    return x + 1 if m.plain.sum() > 2 and not torch.equal(m.plain, m.plain * 2) else x


def made_in_place(m, x, positions):
    scales = torch.zeros(3)
    scales[1] = m.alpha
    return x * 2 if (scales < 0).any() else x


SERVED = [
    table_if_filled, sign, as_a_number, asserted, rows_of, listed, without_a_buffer, made_in_place,
]  # fmt: skip


def of_tokens(m, x, positions):
    return x * 2 if x.abs().max() > 2 else x


def of_positions(m, x, positions):
    return x * 2 if positions.max() > 8 else x


def of_a_row_of_tokens(m, x, positions):
    return x * 2 if m.table[positions].sum() > 0 else x


def of_the_length(m, x, positions):
    return x * 2 if m.table[: x.shape[1]].sum() > 0 else x


def of_a_number_of_tokens(m, x, positions):
    return x * 2 if m.alpha * len(positions[0]) < -3 else x


def written_into_with_tokens(m, x, positions):
    scales = torch.zeros(3)
    scales[1] = x[0, 0, 0]
    return x * 2 if (scales < 0).any() else x


def drawn(m, x, positions):
    return x * 2 if m.alpha + torch.rand(()) > 0 else x


def counting(m, x, positions):
    m.count = m.count + 1
    return x * 2 if m.count > 8 else x


def turning(m, x, positions):
    out = x * 2 if m.alpha_sign > 0 else x * 3
    m.alpha_sign = -torch.ones(())
    return out


REFUSED = [
    of_tokens, of_positions, of_a_row_of_tokens, of_the_length, of_a_number_of_tokens, written_into_with_tokens,
    drawn, counting, turning,
]  # fmt: skip


def built(body):
    model = Decoder(body)
    model.register_buffer("alpha_sign", torch.ones(()))
    return model


@pytest.mark.parametrize("body", SERVED)
def test_the_way_that_the_model_takes_is_served(body):
    model = built(body)
    config = CompileConfig(executable="eager", verify="full", providers={"paged_attention": "reference"})
    compiled = pagebinder.compile_model(model, config)
    engine = compiled.engine(EngineConfig(num_kv_blocks=64))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [[3, 31, 7], [5] * 9]
    for prompt, output in zip(prompts, engine.generate(prompts, params)):
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1].argmax()))
        assert list(output.token_ids) == ids[len(prompt) :]


@pytest.mark.parametrize("value", [0.5, -0.5])
def test_another_value_takes_the_other_way_and_the_report_says_what_decided(value):
    model = built(sign)
    model.alpha.data.fill_(value)
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager"))
    ids, positions = torch.randint(VOCAB_SIZE, (9,)), torch.arange(9)
    with torch.no_grad():
        expected = model(ids[None], positions[None])[0]
    torch.testing.assert_close(compiled.run_level("semantic", ids), expected)
    (decision,) = decisions_of(compiled.graphs["captured"].graph)
    assert decision.weights == ("alpha",) and "test_weight_values.py:" in decision.place
    assert "decides by values of alpha" in compiled.explain() and "compile again" in compiled.explain()


def test_an_artefact_says_it_too(tmp_path):
    pagebinder.compile_model(built(sign), CompileConfig(executable="eager")).save(tmp_path)
    assert "decides by values of alpha" in pagebinder.load(tmp_path).explain()


def test_weights_that_decide_nothing_are_followed():
    model = built(lambda m, x, positions: x * m.alpha)
    gm, _ = capture(source_from_module(model))
    assert decisions_of(gm.graph) == ()
    model.alpha.data.fill_(2.0)
    ids, positions = torch.randint(VOCAB_SIZE, (9,)), torch.arange(9)
    with torch.no_grad():
        torch.testing.assert_close(gm(ids, positions), model(ids[None], positions[None])[0])


@pytest.mark.parametrize("body", REFUSED)
def test_what_else_decides_is_refused(body):
    model = built(body)
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    with pytest.raises(CaptureError):
        capture(source_from_module(model))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0] and torch.equal(tensor, before[name][1])


def test_a_branch_by_tokens_is_told_as_ever():
    with pytest.raises(CaptureError, match=rf"branches on values of tensors, .*{PLACE} in of_tokens"):
        capture(source_from_module(built(of_tokens)))


def test_weights_without_values_are_said_to_have_none():
    with torch.device("meta"):
        model = built(sign)
    with pytest.raises(
        CaptureError, match=rf"asks for values of weights at .*{PLACE}.*meta device they have none"
    ):
        capture(source_from_module(model))
