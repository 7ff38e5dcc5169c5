"""Rows that masks choose: the same for all rows, or refused with what is not known of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pagebinder
from pagebinder import CaptureError, CompileConfig, EngineConfig, SamplingParams
from pagebinder.graph_tools import aten
from tests.frontend import expert_loops as loops
from tests.frontend import plain_decoders as plain
from tests.frontend.expert_loops import NUM_EXPERTS, TOP_K, Loop
from tests.graphs import Embedded, captured_model, count

MESSAGE = "picks entries by their values in body"


def both(model, num_tokens):
    ids = torch.randint(32, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    positions = torch.arange(num_tokens)
    with torch.no_grad():
        return model(ids[None], positions[None])[0], captured_model(model)(ids, positions)


@pytest.mark.parametrize("body", (*loops.SERVED, *loops.LEFT_OUT), ids=lambda body: body.__name__)
def test_chosen_rows_are_computed_for_all(body):
    model = Embedded(Loop(body)).eval()
    gm = captured_model(model)
    assert not count(gm, aten.where.default, aten.nonzero.default, aten.nonzero_numpy.default)
    assert count(gm, aten.where.self)
    for num_tokens in (1, 2, 7, 40):
        ids = torch.randint(32, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
        positions = torch.arange(num_tokens)
        with torch.no_grad():
            expected, got = model(ids[None], positions[None])[0], gm(ids, positions)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_in_16_bits_nothing_is_rounded_otherwise():
    model = Embedded(Loop(loops.one_hot_and_index_add)).to(torch.bfloat16).eval()
    expected, got = both(model, 40)
    torch.testing.assert_close(got, expected)


class Decoder(nn.Module):
    """Two layers of attention and a mixture."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.narrow = nn.Embedding(32, plain.WIDTH), nn.Linear(plain.WIDTH, loops.WIDTH)
        self.attention = nn.ModuleList(plain.MultiheadAttention() for _ in range(2))
        self.mixtures = nn.ModuleList(Loop(body) for _ in range(2))
        self.wide, self.head = nn.Linear(loops.WIDTH, plain.WIDTH), nn.Linear(plain.WIDTH, 32)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for attention, mixture in zip(self.attention, self.mixtures):
            x = x + attention(x)
            x = x + self.wide(mixture(self.narrow(x)))
        return self.head(x)


def greedy(model, prompt, num_tokens):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


PROMPTS = [[3, 31, 7, 9, 9, 1, 0], [5], list(range(20))]


@pytest.mark.parametrize("body", (*loops.SERVED[:4], *loops.LEFT_OUT), ids=lambda body: body.__name__)
def test_tokens_are_those_of_the_module_in_steps_of_several_sequences(body):
    model = Decoder(body).eval()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", verify="sample"))
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_batched_tokens=4))
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [list(a.token_ids) for a in answers] == [greedy(model, prompt, 8) for prompt in PROMPTS]


def each(step):
    """A loop over experts that calls step(y, expert, x, weights, ids, i) for each."""

    def body(experts, x, w, ids):
        y = torch.zeros_like(x)
        for i, expert in enumerate(experts):
            y = step(y, expert, x, w, ids, i)
        return y

    return body


def chosen(change):
    """The first loop, with change(values of chosen rows)."""

    def step(y, expert, x, w, ids, i):
        token, slot = torch.where(ids == i)
        y[token] += w[token, slot, None] * change(expert(x[token]))
        return y

    return each(step)


def with_ids(make):
    """The first loop, with other ids than topk's."""
    return lambda experts, x, w, ids: loops.where_and_add(experts, x, w, make(x, ids))


def other_order(y, expert, x, w, ids, i):
    _slot, token = torch.where((ids == i).t())
    return y.index_add(0, token, expert(x[token]) * w[ids == i][:, None])


def other_rows(y, expert, x, w, ids, i):
    token, _ = torch.where(ids == i)
    y[torch.where(ids == (i + 1) % NUM_EXPERTS)[0]] = expert(x[token])
    return y


def no_more_than_three(y, expert, x, w, ids, i):
    token = torch.where(ids == i)[0][:3]
    return y.index_add(0, token, expert(x[token]))


def by_place(y, expert, x, w, ids, i):
    token, _ = torch.where(ids == i)
    return y.index_add(0, token, expert(x[token]) * token[:, None])


def row_before(y, expert, x, w, ids, i):
    token, _ = torch.where(ids == i)
    return y.index_add(0, token, expert(x[token - 1]))


def by_slot(y, expert, x, w, ids, i):
    token, slot = torch.where(ids == i)
    return y.index_add(0, slot, expert(x[token]))


def row_of_a_table(y, expert, x, w, ids, i):
    token, _ = torch.where(ids == i)
    return y.index_add(0, token, expert(x[token]) * torch.ones(64, 1)[token])


def with_a_factor(y, expert, x, w, ids, i):
    token, _ = torch.where(ids == i)
    return y.index_add(0, token, expert(x[token]), alpha=2)


def sum_of_rows(y, expert, x, w, ids, i):
    return y + expert(x[(ids == i).any(-1)]).sum(0)


def entry_of_a_table(y, expert, x, w, ids, i):
    """Of rows that nobody chose the entry may be none."""
    token, _ = torch.where(ids == i)
    return y.index_add(0, token, torch.eye(loops.WIDTH)[(x[token, 0] * 0).long()])


def attended(v):
    return F.scaled_dot_product_attention(v[None], v[None], v[None], is_causal=True)[0]


REFUSED = {
    "ids that may be the same": (
        with_ids(lambda x, ids: torch.stack((x[:, :2].argmax(-1), x[:, 2:4].argmax(-1)), 1)),
        "may choose an expert twice",
    ),
    "ids by a map": (with_ids(lambda x, ids: torch.tensor([0, 1, 0, 1])[ids]), "may choose an expert twice"),
    "the best tokens": (with_ids(lambda x, ids: x[:, :TOP_K].sort(dim=0)[1]), "may choose an expert twice"),
    "softmax over rows": (chosen(lambda v: v.softmax(0)), "it works along the token dimension"),
    "mean of rows": (chosen(lambda v: v - v.mean(0)), "it reduces over the tokens"),
    "rows so far": (chosen(lambda v: v.cumsum(0)), "it works along the token dimension"),
    "rows in turn": (chosen(lambda v: v.flip(0)), "it works along the token dimension"),
    "the row before": (chosen(lambda v: F.pad(v, (0, 0, 1, -1))), "it pads along the token dimension"),
    "sorted rows": (chosen(lambda v: v.sort(0)[0]), "it works along the token dimension"),
    "attention among rows": (chosen(attended), "not known to keep tokens apart"),
    "turned rows": (chosen(lambda v: v.t().reshape(-1, loops.WIDTH)), "tokens swap places"),
    "how many": (chosen(lambda v: v / (1 + v.shape[0])), "the number of tokens"),
    "counted rows": (chosen(lambda v: v * torch.arange(v.shape[0])[:, None]), "the number of chosen ones"),
    "several orders": (each(other_order), "several masks chose, or in several orders"),
    "other rows": (each(other_rows), "to others than they were chosen from"),
    "a capacity": (each(no_more_than_three), "computes with the places"),
    "by place": (each(by_place), "computes with the places"),
    "the row before by place": (each(row_before), "computes with the places"),
    "rows by slot": (each(by_slot), "does not say which token it is"),
    "rows of a table": (each(row_of_a_table), "has other rows than it"),
    "with a factor": (each(with_a_factor), "with a factor"),
    "sum of rows": (each(sum_of_rows), "it reduces over the tokens"),
    "entries of a table": (each(entry_of_a_table), "whole numbers"),
    "values that are there": (each(lambda y, expert, x, *_: y + x[:, 0].unique().sum()), "in a way that is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_to_be_the_same_is_refused(name):
    body, reason = REFUSED[name]
    with pytest.raises(CaptureError, match=rf"{MESSAGE}.*{reason}"):
        captured_model(Embedded(Loop(body)))


def test_a_capacity_by_counting_tokens_is_refused_by_the_audit():
    def step(y, expert, x, w, ids, i):
        mask = (ids == i).any(-1)
        mask = mask & (mask.cumsum(0) < 4)
        y[mask] += expert(x[mask])
        return y

    with pytest.raises(CaptureError, match="cumsum.*works along the token dimension"):
        pagebinder.compile_model(Decoder(each(step)).eval(), CompileConfig(executable="eager"))


def left_out(branch):
    """A loop with branch(y, mask, rest, i), where rest(y) adds what the expert makes of its tokens."""

    def step(y, expert, x, w, ids, i):
        mask = ids == i

        def rest(y):
            token, slot = torch.where(mask)
            y[token] += w[token, slot, None] * expert(x[token])
            return y

        return branch(y, mask, rest, ids, i)

    return each(step)


HARMLESS = {
    "if any": lambda y, mask, rest, *_: rest(y) if mask.any() else y,
    "if not any": lambda y, mask, rest, *_: y if not torch.any(mask) else rest(y),
    "any of rows": lambda y, mask, rest, *_: rest(y) if mask.any(-1).any() else y,
    "sum": lambda y, mask, rest, *_: y if mask.sum() == 0 else rest(y),
    "if sum": lambda y, mask, rest, *_: rest(y) if mask.sum(-1).sum() else y,
    "item of sum": lambda y, mask, rest, *_: rest(y) if mask.sum().item() > 0 else y,
    "if item of sum": lambda y, mask, rest, *_: rest(y) if mask.sum().item() else y,
    "item of any": lambda y, mask, rest, *_: rest(y) if mask.any().item() else y,
    "rows": lambda y, mask, rest, *_: rest(y) if mask.nonzero().shape[0] >= 1 else y,
    "counted": lambda y, mask, rest, *_: rest(y) if mask.count_nonzero() != 0 else y,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_experts_that_nobody_chose_may_be_left_out(name):
    model = Decoder(left_out(HARMLESS[name])).eval()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", verify="sample"))
    assert not count(compiled.graphs["captured"], aten._assert_async.msg, aten.any.default)
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_batched_tokens=4))
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [list(a.token_ids) for a in answers] == [greedy(model, prompt, 8) for prompt in PROMPTS]


def over_hits(step):
    """A loop over experts that somebody chose, with step(y, hit, expert, x, token, scale)."""

    def body(experts, x, w, ids):
        y = torch.zeros_like(x)
        hits = F.one_hot(ids, num_classes=NUM_EXPERTS).sum((0, 1)).nonzero()[:, 0]
        for i in hits:
            token, slot = torch.where(ids == i)
            y = step(y, hits, experts[i], x, token, w[token, slot, None])
        return y

    return body


def to_the_last_alone(y, hits, expert, x, token, scale):
    return torch.zeros_like(x).index_add(0, token, expert(x[token]) * scale)


def to_all_rows(y, hits, expert, x, token, scale):
    return (y + 0.1).index_add(0, token, expert(x[token]) * scale)


def by_how_many(y, hits, expert, x, token, scale):
    return y.index_add(0, token, expert(x[token]) * scale / hits.shape[0])


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (to_the_last_alone, "something else then"),
        (to_all_rows, "something else then"),
        (by_how_many, "picks entries by their values"),
    ],
)
def test_a_loop_over_experts_that_does_something_for_others_is_refused(step, reason):
    with pytest.raises(CaptureError, match=reason):
        captured_model(Embedded(Loop(over_hits(step))))


# what -> (the branch, what is said)
HARMFUL = {
    "something else": (lambda y, mask, rest, *_: rest(y) if mask.any() else y + 1, "something else then"),
    "something for all": (lambda y, mask, rest, *_: rest(y + 1) if mask.any() else y, "something else then"),
    "another expert's": (
        lambda y, mask, rest, ids, i: rest(y) if (ids == (i + 1) % NUM_EXPERTS).any() else y,
        "something else then",
    ),
    "never": (lambda y, mask, rest, *_: rest(y) if (y < 1e9).any() else y, "did not happen in 64 runs"),
    "a capacity": (
        lambda y, mask, rest, *_: rest(y) if mask.sum() > 2 else y,
        "branches on values of tensors",
    ),
    "few": (
        lambda y, mask, rest, *_: y if mask.sum().item() < 2 else rest(y),
        "branches on values of tensors",
    ),
    "all": (lambda y, mask, rest, *_: rest(y) if not mask.all() else y, "branches on values of tensors"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_branch_that_does_something_for_no_rows_is_refused(name):
    branch, reason = HARMFUL[name]
    with pytest.raises(CaptureError, match=reason):
        captured_model(Embedded(Loop(left_out(branch))))


def test_what_asks_in_torchs_place_is_not_named():
    branch = HARMFUL["few"][0]
    with pytest.raises(CaptureError) as error:
        captured_model(Embedded(Loop(left_out(branch))))
    assert "in <lambda>" in str(error.value) and "asked" not in str(error.value)


def test_a_branch_is_refused_where_weights_have_no_values():
    with pytest.raises(CaptureError, match="weights without values"):
        captured_model(Embedded(Loop(left_out(HARMLESS["if any"]))).to("meta"))


def test_a_question_about_no_rows_is_refused():
    """Its branch does nothing that shows, but the mask is not one of tokens."""

    def body(experts, x, w, ids):
        return x + 0.0 if (x.sum(0) > 0).any() else x

    with pytest.raises(CaptureError):
        pagebinder.compile_model(Decoder(body).eval(), CompileConfig(executable="eager"))


def test_torch_is_left_as_it_was():
    before = torch.any, torch.Tensor.any, torch.Tensor.__bool__
    captured_model(Embedded(Loop(left_out(HARMLESS["if any"]))))
    assert (torch.any, torch.Tensor.any, torch.Tensor.__bool__) == before
    assert not {"any", "__bool__"} & set(vars(torch.Tensor))
