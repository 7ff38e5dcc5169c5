"""Linear layers of the same value in one op, and gated ones with their gate: structure, values, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.custom_ops.cpu import build
from pagebinder.frontend.recognise import recognise_gated_activation
from pagebinder.passes.fuse_gated_linear import fuse_gated_linear
from pagebinder.passes.merge_linears import merge_linears
from pagebinder.passes.place_linears import place_linears
from tests.graphs import assert_metadata_kept, captured, clone, count, run

WIDTH = 64
OURS = torch.ops.pagebinder
pytestmark = pytest.mark.skipif(build.problem() is not None, reason="no C++ compiler")


class Siblings(nn.Module):
    """Three layers on one value, whose second one is called twice; a fourth on another value."""

    def __init__(self, biases=(True, True, True)):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, 32 * (i + 1), bias=b) for i, b in enumerate(biases))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, positions):
        a, b, c = (part(x) for part in self.parts)
        return torch.cat((a, b.sin(), c.cos(), self.last(x.exp())), -1)


class Gated(nn.Module):
    def __init__(self, up_width=96, read_twice=False):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, up_width, bias=False)
        self.read_twice = read_twice

    def forward(self, x, positions):
        gate, up = self.gate(x), self.up(x)
        out = nn.functional.silu(gate) * up
        return out + gate if self.read_twice else out


def prepared(body):
    gm = captured(body, width=WIDTH, dtype=torch.bfloat16)
    recognise_gated_activation(gm)
    place_linears(gm)
    return gm


def test_siblings_become_one_call_that_reads_their_own_weights():
    before = prepared(Siblings())
    after = clone(before)
    result = merge_linears(after)
    assert [m.detail for m in result.matches] == ["3 layers"] and not result.refusals
    assert count(after, OURS.linears.default) == 1 and count(after, OURS.linear.default) == 1
    assert_metadata_kept(after, OURS.linears.default)
    assert {n.target for n in after.graph.nodes if n.op == "get_attr"} == {
        n.target for n in before.graph.nodes if n.op == "get_attr"
    }
    for num_tokens in (1, 9):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))


def test_siblings_of_which_some_have_a_bias_are_refused():
    gm = prepared(Siblings(biases=(True, False, True)))
    result = merge_linears(gm)
    assert not result.matches and "some have not" in result.refusals[0].reason


def test_a_gated_layer_becomes_one_call():
    before = prepared(Gated())
    after = clone(before)
    result = fuse_gated_linear(after)
    assert len(result.matches) == 1 and not result.refusals
    assert count(after, OURS.gated_linear.default) == 1
    assert count(after, OURS.linear.default, OURS.gated_activation.default) == 0
    assert_metadata_kept(after, OURS.gated_linear.default)
    for num_tokens in (1, 9):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (Gated(read_twice=True), "read elsewhere"),
        (lambda x, positions: nn.functional.silu(x.sin()) * x.cos(), "not two linear layers"),
    ],
    ids=["gate read twice", "no linears"],
)
def test_near_misses_of_gated_layers_are_refused(body, reason):
    gm = prepared(body)
    result = fuse_gated_linear(gm)
    assert not result.matches and reason in result.refusals[0].reason
