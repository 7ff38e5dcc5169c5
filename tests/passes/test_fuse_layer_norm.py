"""LayerNorm, and the residual add before it, in one op."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.graph_tools import aten
from pagebinder.passes.fuse_layer_norm import fuse_layer_norm
from tests.graphs import WIDTH, captured, clone, count, run

NORM, OF_SUM = torch.ops.pagebinder.layer_norm.default, torch.ops.pagebinder.add_layer_norm.default


class Body(nn.Module):
    def __init__(self, function, **options):
        super().__init__()
        self.function = function
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH, eps=1e-3, **options), nn.LayerNorm(WIDTH)])
        self.pairs = nn.LayerNorm((2, WIDTH // 2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1, 2, parameter.numel()).view(parameter.shape))

    def forward(self, x, positions):
        return self.function(x, *self.norms, self.pairs)


def fused(function, dtype=torch.float32, **options):
    before = captured(Body(function, **options), dtype=dtype)
    after = clone(before)
    result = fuse_layer_norm(after)
    for num_tokens in (1, 9):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))
    assert count(after, aten.layer_norm.default) == len(result.refusals)
    return after, result


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_by_itself(dtype, options):
    gm, result = fused(lambda x, norm, *_: norm(x), dtype, **options)
    assert count(gm, NORM) == 1 and count(gm, OF_SUM) == 0 and len(result.matches) == 1 and result.changed


def test_a_sum_and_its_norm_become_one_op():
    def function(x, norm, other, _):
        h = x + x.sin()
        return other(h + norm(h).exp())

    gm, result = fused(function)
    assert count(gm, OF_SUM) == 2 and count(gm, NORM, aten.add.Tensor) == 0
    assert [m.detail for m in result.matches] == ["of a sum", "of a sum"]


def test_two_norms_of_one_sum_stay_norms():
    """GPT-NeoX: attention and MLP read the same sum through norms of their own."""

    def function(x, norm, other, _):
        h = x + x.sin()
        return norm(h) + other(h)

    gm, _ = fused(function)
    assert count(gm, NORM) + count(gm, OF_SUM) == 2


def test_a_norm_over_two_dimensions_is_refused():
    _, result = fused(lambda x, norm, other, pairs: pairs(x.view(1, -1, 2, WIDTH // 2)))
    assert [r.reason for r in result.refusals] == [
        "it normalises 2 dimensions together"
    ] and not result.changed
