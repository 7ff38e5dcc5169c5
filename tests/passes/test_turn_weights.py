"""Products with a parameter [K, N] become linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.graph_tools import aten, calls, recipe_of
from pagebinder.passes.turn_weights import turn_weights, turned
from tests.graphs import captured, clone, count, run

WIDTH = 32
PRODUCTS = (aten.addmm.default, aten.mm.default, aten.matmul.default)


class Body(nn.Module):
    def __init__(self, function, sizes=(WIDTH, 2 * WIDTH)):
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(sizes, generator=generator) / 8)
        self.bias = nn.Parameter(torch.randn(sizes[1], generator=generator))

    def forward(self, x, positions):
        return self.function(x, self.weight, self.bias)


def rewritten(function, dtype=torch.float32, **options):
    before = captured(Body(function, **options), width=WIDTH, dtype=dtype)
    after = clone(before)
    result = turn_weights(after)
    for num_tokens in (1, 9):
        expected, got = run(before, num_tokens), run(after, num_tokens)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got, expected, **tolerance)
    return after, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_with_and_without_a_bias(dtype):
    def function(x, weight, bias):
        rows = x.view(-1, WIDTH)
        return torch.addmm(bias, rows, weight) + torch.mm(rows, weight) + torch.matmul(x, weight)

    gm, result = rewritten(function, dtype)
    assert count(gm, aten.linear.default) == 3 and count(gm, *PRODUCTS) == 0 and len(result.matches) == 3
    weights = {n.args[1].target for n in calls(gm.graph, aten.linear.default)}
    assert len(weights) == 1  # made once
    made = getattr(gm, weights.pop())
    assert made.is_contiguous() and recipe_of(made).function is turned


@pytest.mark.parametrize(
    ("function", "sizes", "reason"),
    [
        (lambda x, w, b: torch.addmm(b, x.view(-1, WIDTH), w, alpha=2), (WIDTH, WIDTH), "has a factor"),
        (lambda x, w, b: torch.addmm(b, x.view(-1, WIDTH), w), (WIDTH, 40), "not multiples of 32"),
        (lambda x, w, b: torch.addmm(b[:1], x.view(-1, WIDTH), w), (WIDTH, WIDTH), None),  # no parameter
        (lambda x, w, b: torch.mm(w, w) + x.sum(), (WIDTH, WIDTH), None),
    ],
)
def test_others_stay(function, sizes, reason):
    gm, result = rewritten(function, sizes=sizes)
    if reason is None:
        assert not result.refusals
    else:
        assert len(result.refusals) == 1 and reason in result.refusals[0].reason and not result.changed
