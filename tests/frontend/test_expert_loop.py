"""Loops over alike experts become one mixture, whose router is fused; others compute every expert for every token."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.frontend.recognise import recognise_expert_loop, recognise_gated_activation
from pagebinder.graph_tools import aten
from tests.frontend import expert_loops as loops
from tests.frontend.expert_loops import Expert, Loop
from tests.frontend.test_chosen_rows import PROMPTS, Decoder, chosen, each, greedy
from tests.graphs import assert_metadata_kept, captured, clone, count, run

MIXTURE = torch.ops.pagebinder.moe_experts.default


def recognised(body, expert=Expert):
    gm = captured(Loop(body, expert))
    recognise_gated_activation(gm)
    before = clone(gm)
    return before, gm, recognise_expert_loop(gm)


def plain_expert(activation):
    return lambda: nn.Sequential(
        nn.Linear(loops.WIDTH, 24), activation, nn.Linear(24, loops.WIDTH), nn.Dropout(0.1)
    )


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(loops.WIDTH, 48, bias=False), nn.Linear(24, loops.WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


EXPERTS = {
    "gated": Expert,
    "with biases": lambda: Expert(bias=True),
    "halves of one projection": Halves,
    "gelu": plain_expert(nn.GELU()),
    "gelu tanh": plain_expert(nn.GELU("tanh")),
    "relu": plain_expert(nn.ReLU()),
}


def check(before, gm, result, num_experts=loops.NUM_EXPERTS):
    assert [m.detail.split(" experts")[0] for m in result.matches] == [
        str(num_experts)
    ] and not result.refusals
    assert count(gm, MIXTURE) == 1 and not count(
        gm, aten.where.self, torch.ops.pagebinder.gated_activation.default
    )
    assert_metadata_kept(gm, MIXTURE)
    for num_tokens in (1, 2, 40):
        torch.testing.assert_close(run(gm, num_tokens), run(before, num_tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("expert", EXPERTS)
def test_alike_experts_are_one_mixture(expert):
    check(*recognised(loops.where_and_add, EXPERTS[expert]))


@pytest.mark.parametrize("body", loops.SERVED[1:7], ids=lambda body: body.__name__)
def test_however_the_loop_is_written(body):
    check(*recognised(body))


def test_in_any_order_of_experts_upon_something():
    def body(experts, x, w, ids):
        y = x.sin()
        for i in (2, 0, 1):  # the last one is nobody's
            token, slot = torch.where(ids == i)
            y[token] += experts[i](x[token]) * w[token, slot, None]
        return y

    check(*recognised(body), num_experts=3)


def other_weights(y, expert, x, w, ids, i):
    token, slot = torch.where(ids == i)
    return y.index_add(0, token, expert(x[token]) * (w + i)[token, slot, None])


def other_rows(y, expert, x, w, ids, i):
    token, slot = torch.where(ids == i)
    return y.index_add(0, token, expert((x + i)[token]) * w[token, slot, None])


def no_weights(y, expert, x, w, ids, i):
    token, _ = torch.where(ids == i)
    return y.index_add(0, token, expert(x[token]))


NEAR_MISSES = {
    "weighed differently": (each(other_weights), Expert, "weighed by different values"),
    "of other rows": (each(other_rows), Expert, "differ in what they read"),
    "without weights": (each(no_weights), Expert, "not an expert's output times"),
    "with a norm behind": (chosen(lambda v: F.layer_norm(v, (loops.WIDTH,))), Expert, "not a linear layer"),
    "of one layer": (loops.where_and_add, lambda: nn.Linear(loops.WIDTH, loops.WIDTH), "not a linear layer"),
    "of another activation": (loops.where_and_add, plain_expert(nn.Tanh()), "not a linear layer"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_loops_stay_and_are_told(name):
    body, expert, reason = NEAR_MISSES[name]
    before, gm, result = recognised(body, expert)
    assert not result.matches and not result.changed and not count(gm, MIXTURE)
    assert [reason in refusal.reason for refusal in result.refusals] == [True]
    torch.testing.assert_close(run(gm, 7), run(before, 7))


def test_experts_of_several_kinds_stay():
    kinds = iter([24, 24, 24, 32])

    def expert():
        width = next(kinds)
        return nn.Sequential(nn.Linear(loops.WIDTH, width), nn.ReLU(), nn.Linear(width, loops.WIDTH))

    _, gm, result = recognised(loops.where_and_add, expert)
    assert not count(gm, MIXTURE) and "shapes of their weights" in result.refusals[0].reason


def test_a_sum_that_is_read_on_the_way_stays():
    def body(experts, x, w, ids):
        y, seen = torch.zeros_like(x), []
        for i, expert in enumerate(experts):
            token, slot = torch.where(ids == i)
            y = y.index_add(0, token, expert(x[token]) * w[token, slot, None])
            seen.append(y.sin())
        return y + seen[1]

    _, gm, result = recognised(body)
    assert not count(gm, MIXTURE) and "read by something else" in result.refusals[0].reason


@pytest.mark.parametrize("body", loops.SERVED[:3], ids=lambda body: body.__name__)
def test_a_step_reads_the_chosen_experts_alone_and_gives_the_modules_tokens(body):
    model = Decoder(body).eval()
    compiled = pagebinder.compile_model(model, CompileConfig(executable="eager", verify="full"))
    targets = [
        str(node.target) for node in compiled.graphs["fused"].graph.nodes if node.op == "call_function"
    ]
    assert sum("moe_routed_experts" in target for target in targets) == 2
    engine = compiled.engine(EngineConfig(num_kv_blocks=64, max_num_batched_tokens=4))
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert [list(a.token_ids) for a in answers] == [greedy(model, prompt, 8) for prompt in PROMPTS]
