"""A norm and the layers that alone read it in one op, without changing a bit; what else reads it is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.custom_ops.cpu import build
from pagebinder.frontend.recognise import recognise_gated_activation, recognise_rms_norm
from pagebinder.passes.fuse_add_rms_norm import fuse_add_rms_norm
from pagebinder.passes.fuse_gated_linear import fuse_gated_linear
from pagebinder.passes.fuse_norm_linears import fuse_norm_linears
from pagebinder.passes.merge_linears import merge_linears
from pagebinder.passes.place_linears import place_linears
from pagebinder.passes.simplify import simplify
from tests.graphs import assert_metadata_kept, captured, clone, count, run

WIDTH = 64
OURS = torch.ops.pagebinder
FUSED = OURS.norm_linears.default
NORMS = OURS.rms_norm.default, OURS.add_rms_norm.default
LAYERS = OURS.linear.default, OURS.linears.default, OURS.gated_linear.default
pytestmark = pytest.mark.skipif(build.problem() is not None, reason="no C++ compiler")


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Body(nn.Module):
    """function(x, norm, layers)"""

    def __init__(self, function, biases=(True, True, True)):
        super().__init__()
        self.function, self.norm = function, Norm()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=b) for b in biases)

    def forward(self, x, positions):
        return self.function(x, self.norm, self.layers)


def fused(function, **options):
    before = captured(Body(function, **options), width=WIDTH, dtype=torch.bfloat16)
    for recognise in (recognise_rms_norm, recognise_gated_activation, simplify, fuse_add_rms_norm):
        recognise(before)
    for join in (place_linears, fuse_gated_linear, merge_linears):
        join(before)
    after = clone(before)
    return before, after, fuse_norm_linears(after)


def siblings(x, norm, layers):
    h = x + x.sin()
    y = norm(h)
    return h.cos() + layers[0](y) * layers[1](y) + layers[2](y)


def gated(x, norm, layers):
    h = x + x.sin()
    y = norm(h)
    return h + nn.functional.silu(layers[0](y)) * layers[1](y)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (siblings, {}),
        (siblings, {"biases": (False, False, False)}),
        (gated, {}),
        (gated, {"biases": (False, False)}),
        (lambda x, norm, layers: layers[0](norm(x)), {}),
        (lambda x, norm, layers: layers[0](norm(x + x.sin())), {"biases": (False,)}),
    ],
    ids=[
        "siblings",
        "no biases",
        "a gate",
        "a gate without biases",
        "no sum",
        "a sum that nobody else reads",
    ],
)
def test_a_norm_and_its_layers_become_one_op(function, options):
    before, after, result = fused(function, **options)
    assert len(result.matches) == 1 and not result.refusals and result.changed
    assert count(before, *NORMS) == count(before, *LAYERS) == 1 == count(after, FUSED)
    assert count(after, *NORMS, *LAYERS) == 0
    assert_metadata_kept(after, FUSED)
    for num_tokens in (1, 9):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (lambda x, norm, layers: (y := norm(x)) + layers[0](y), {}, "more than one op"),
        (lambda x, norm, layers: norm(x).sin(), {}, "not read by linear layers"),
        (gated, {"biases": (True, False)}, "one half of the gate"),
    ],
    ids=["read twice", "no layer", "one bias"],
)
def test_near_misses_are_refused(function, options, reason):
    before, after, result = fused(function, **options)
    assert not result.matches and reason in result.refusals[0].reason
    assert torch.equal(run(before, 5), run(after, 5))
