"""LayerNorm written out -> torch's layer_norm, to rounding; what is no LayerNorm is refused or left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.frontend.recognise import recognise_layer_norm, recognise_rms_norm
from tests.graphs import WIDTH, captured, clone, count, run

LAYER_NORM = torch.ops.aten.layer_norm.default


class Norm(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.3, 1.7, WIDTH))
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH))

    def forward(self, x, positions):
        return self.function(x, self.weight, self.bias)


def mean(x):
    return x.mean(-1, keepdim=True)


def variance(x):
    return mean((x - mean(x)).pow(2))


def as_cohere(x, w):
    x = x.float()
    return w.float() * ((x - mean(x)) * torch.rsqrt(variance(x) + 1e-5))


FORMS = {
    "rsqrt": lambda x, w, b: (c := x - mean(x)) * torch.rsqrt(mean(c * c) + 1e-5) * w + b,
    "mean taken twice": lambda x, w, b: w * ((x - mean(x)) * torch.rsqrt(variance(x) + 1e-5)) + b,
    "quotient": lambda x, w, b: w * ((x - mean(x)) / torch.sqrt(variance(x) + 1e-5)) + b,
    "biased var": lambda x, w, b: (
        (x - mean(x)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * w + b
    ),
    "power": lambda x, w, b: (x - mean(x)) * (variance(x) + 1e-5).pow(-0.5) * w + b,
    "no bias": lambda x, w, b: (x - mean(x)) * torch.rsqrt(variance(x) + 1e-5) * w,
    "no weight": lambda x, w, b: (x - mean(x)) * torch.rsqrt(variance(x) + 1e-5),
    "computed in float32": lambda x, w, b: as_cohere(x, w).to(x.dtype),
}


def recognised(function, dtype=torch.float32):
    before = captured(Norm(function), dtype=dtype)
    after = clone(before)
    return before, after, recognise_layer_norm(after)


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_recognised_and_equal(form):
    before, after, result = recognised(FORMS[form])
    assert [m.detail for m in result.matches] == ["eps=1e-05"] and not result.refusals
    assert count(after, LAYER_NORM) == 1
    assert not recognise_rms_norm(after).refusals
    torch.testing.assert_close(run(after, 20), run(before, 20), atol=2e-6, rtol=1e-5)


REFUSED = {
    "something else than the centred": lambda x, w, b: x * torch.rsqrt(variance(x) + 1e-5) * w,
    "not in float32": lambda x, w, b: (x - mean(x)) * torch.rsqrt(variance(x) + 1e-5),
    "other places": lambda x, w, b: (x - mean(x)) * (r := torch.rsqrt(variance(x) + 1e-5)) + r,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_near_misses_are_refused_with_the_reason(reason):
    before, after, result = recognised(
        REFUSED[reason], torch.bfloat16 if "float32" in reason else torch.float32
    )
    assert not result.matches and count(after, LAYER_NORM) == 0
    assert [reason in r.reason for r in result.refusals] == [True]
    assert torch.equal(run(after, 20), run(before, 20))


def test_an_unbiased_variance_is_no_layer_norm():
    _, after, result = recognised(
        lambda x, w, b: (x - mean(x)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5) * w
    )
    assert not result.matches and recognise_rms_norm(after).refusals
