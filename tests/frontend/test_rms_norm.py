"""RMSNorm: every tail keeps every bit of the source's rounding, and what is not RMSNorm is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.frontend.recognise import recognise_rms_norm
from pagebinder.graph_tools import calls
from tests.graphs import WIDTH, assert_metadata_kept, captured, clone, count, run

RMS_NORM = torch.ops.pagebinder.rms_norm.default


def normed(x, eps=1e-5):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


TAILS = {
    "cast_scale": lambda x, w: w * normed(x).to(x.dtype),
    "scale_cast": lambda x, w: (w * normed(x)).to(x.dtype),
    "offset": lambda x, w: (normed(x) * (1.0 + w.float())).to(x.dtype),
    "none": lambda x, w: normed(x).to(x.dtype),
}
SPELLINGS = {
    "x * x": lambda x, w: w * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)),
    "square": lambda x, w: w * (x * torch.rsqrt(torch.square(x).mean(-1, keepdim=True) + 1e-5)),
    "eps first": lambda x, w: w * (torch.rsqrt(1e-5 + x.pow(2).mean(dim=[-1], keepdim=True)) * x),
    "dim from the left": lambda x, w: (x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 1e-5)) * w,
}


class Norm(nn.Module):
    def __init__(self, function, width: int = WIDTH):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.3, 1.7, width))

    def forward(self, x, positions):
        return self.function(x, self.weight)


def recognised(function, dtype=torch.float32, width=WIDTH):
    """(graph before, graph after, what the pass said)."""
    before = captured(Norm(function, width), dtype=dtype, width=width)
    after = clone(before)
    return before, after, recognise_rms_norm(after)


def assert_same_bits(before, after):
    for num_tokens in (1, 5, 40):
        expected, got = run(before, num_tokens), run(after, num_tokens)
        assert got.dtype is expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_every_tail_keeps_every_bit(tail, dtype):
    before, after, result = recognised(TAILS[tail], dtype)
    assert count(after, RMS_NORM) == 1 and count(after, torch.ops.aten.rsqrt.default) == 0
    assert len(result.matches) == 1 and not result.refusals and result.changed
    if dtype is not torch.float32:  # in float32, casting before and after the weight is the same
        assert next(calls(after.graph, RMS_NORM)).kwargs["tail"] == tail
    assert_same_bits(before, after)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_the_head(spelling):
    before, after, result = recognised(SPELLINGS[spelling])
    assert len(result.matches) == 1
    assert_same_bits(before, after)


def test_source_line_and_module_are_kept():
    _, after, result = recognised(TAILS["cast_scale"])
    assert_metadata_kept(after, RMS_NORM)
    assert result.matches[0].module_path == "body"


def test_a_chain_of_two_and_a_value_with_several_users():
    def twice(x, w):
        y = TAILS["cast_scale"](x, w)
        return TAILS["scale_cast"](y, w) + y * 0.5 + x

    before, after, result = recognised(twice, torch.bfloat16)
    assert [m.detail.split(",")[0] for m in result.matches] == ["tail=cast_scale", "tail=scale_cast"]
    assert_same_bits(before, after)


def mixed_weight(cast):
    """A float32 weight in a bfloat16 model."""
    return lambda x, w: cast(x.to(torch.bfloat16), w).float()


UNUSUAL_CASTS = {
    "float32 weight on the rounded value": mixed_weight(lambda x, w: w * normed(x).to(x.dtype)),
    "rounded weight on the rounded value": mixed_weight(lambda x, w: w.to(x.dtype) * normed(x).to(x.dtype)),
    "float32 weight before the cast": mixed_weight(lambda x, w: (w * normed(x)).to(x.dtype)),
    "rounded weight before the cast": mixed_weight(lambda x, w: (w.to(x.dtype) * normed(x)).to(x.dtype)),
    "no cast back": mixed_weight(lambda x, w: w * normed(x)),
    "offset in bfloat16": mixed_weight(lambda x, w: ((1.0 + w.to(x.dtype)) * normed(x)).to(x.dtype)),
    "offset rounded after the sum": mixed_weight(
        lambda x, w: ((1.0 + w).to(x.dtype) * normed(x)).to(x.dtype)
    ),
    "float16 weight": mixed_weight(lambda x, w: (w.half() * normed(x)).to(x.dtype)),
    "cast elsewhere after the weight": lambda x, w: (w * normed(x)).to(torch.bfloat16).float(),
    "cast elsewhere without a weight": lambda x, w: normed(x).to(torch.bfloat16).float(),
    "bfloat16 between norm and weight": lambda x, w: w * normed(x).to(torch.bfloat16),
    "bfloat16 between and back": lambda x, w: w * normed(x).to(torch.bfloat16).to(torch.float32),
    "input rounded before the norm": lambda x, w: normed(x.to(torch.bfloat16).float()) * w,
    "normed twice in one product": lambda x, w: normed(x).half() * normed(x) * w,
    "float64 in, float32 norm": lambda x, w: normed(x.double()) * w,
    "float64 norm": lambda x, w: x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5),
}


@pytest.mark.parametrize("name", UNUSUAL_CASTS)
def test_casts_in_unusual_places_never_change_a_bit(name):
    before, after, _ = recognised(UNUSUAL_CASTS[name])
    assert_same_bits(before, after)


def test_a_weight_that_is_rounded_first_is_part_of_the_contract():
    """bfloat16 weights, widened before the product with the rounded value: the result is float32."""
    before, after, _ = recognised(lambda x, w: w.float() * normed(x).to(x.dtype), torch.bfloat16)
    assert_same_bits(before, after)
    before, after, _ = recognised(lambda x, w: (normed(x) * (1.0 + w)).to(x.dtype), torch.bfloat16)
    assert_same_bits(before, after)


OTHER_ROOTS = {
    "power": lambda x, w: w * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).pow(-0.5)),
    "quotient": lambda x, w: w * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "quotient by a power": lambda x, w: w * (x / (x.pow(2).mean(-1, keepdim=True) + 1e-5) ** 0.5),
    "reciprocal": lambda x, w: w * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt().reciprocal()),
}


@pytest.mark.parametrize("name", OTHER_ROOTS)
def test_other_spellings_of_the_root_agree_to_rounding(name):
    before, after, result = recognised(OTHER_ROOTS[name])
    assert len(result.matches) == 1 and not result.refusals
    torch.testing.assert_close(run(after, 20), run(before, 20), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eps", [1e-5, None], ids=str)
def test_torchs_own_rms_norm_keeps_every_bit(eps, dtype):
    before, after, result = recognised(lambda x, w: nn.functional.rms_norm(x, [WIDTH], w, eps), dtype)
    assert [m.detail.split(",")[0] for m in result.matches] == ["tail=scale_cast"]
    assert count(after, torch.ops.aten.rms_norm.default) == 0
    assert_same_bits(before, after)


def test_torchs_rms_norm_over_two_dimensions_is_refused():
    def body(x, w):
        return nn.functional.rms_norm(x.unflatten(-1, (2, -1)), [2, WIDTH // 2]).flatten(-2)

    result = recognised(body)[2]
    assert not result.matches and "several dimensions" in result.refusals[0].reason


GATED = {
    "gated before the norm, as Mamba2": lambda x, w: (
        w * normed(x.float() * nn.functional.silu(x.cos().float())).to(x.dtype)
    ),
    "gated after the norm, as Qwen3-Next": lambda x, w: (
        (w * normed(x).to(x.dtype)).float() * nn.functional.silu(x.cos().float())
    ).to(x.dtype),
}


@pytest.mark.parametrize("name", GATED)
def test_gated_norms_are_matched_without_their_gate(name):
    before, after, result = recognised(GATED[name], torch.bfloat16)
    assert len(result.matches) == 1 and not result.refusals
    assert_same_bits(before, after)


NEAR_MISSES = {
    "literal eps": lambda x, w: w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w[0]),
    "last dimension": lambda x, w: w * x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-5),
    "not a mean": lambda x, w: w * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5),
    "not of a square": lambda x, w: w * x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-5),
    "with keepdim": lambda x, w: w * x * torch.rsqrt(x.pow(2).mean(-1) + 1e-5).unsqueeze(-1),
    "something else than": lambda x, w: (
        w * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    ),
    "other places": lambda x, w: (r := torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)) * x * w + r,
    "literal eps ": lambda x, w: (
        w * x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1e-5, alpha=2))
    ),
    "over the tokens": lambda x, w: normed(x.transpose(1, 2)).transpose(1, 2) * w,
}


@pytest.mark.parametrize("reason", NEAR_MISSES)
def test_near_misses_are_refused_with_the_reason(reason):
    before, after, result = recognised(NEAR_MISSES[reason])
    assert not result.matches and not result.changed and count(after, RMS_NORM) == 0
    (refusal,) = result.refusals
    assert reason.strip() in refusal.reason
    assert refusal.module_path == "body" and "test_rms_norm.py:" in refusal.source_line
    assert_same_bits(before, after)


def test_a_square_in_low_precision_is_refused():
    def low(x, w):
        return (x.float() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).float() + 1e-5)).to(x.dtype) * w

    def widened_by_the_mean(x, w):
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.float32) + 1e-5)
        return (x.float() * r).to(x.dtype) * w

    for function in (low, widened_by_the_mean):
        before, after, result = recognised(function, torch.bfloat16)
        assert not result.matches and result.refusals
        assert_same_bits(before, after)


def test_layer_norm_is_not_rms_norm():
    def layer_norm(x, w):
        centred = x - x.mean(-1, keepdim=True)
        return w * centred * torch.rsqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5)

    before, after, result = recognised(layer_norm)
    assert not result.matches
    assert_same_bits(before, after)


def test_a_weight_of_another_shape_stays_outside():
    before, after, result = recognised(lambda x, w: normed(x) * w[:1])
    assert [m.detail.split(",")[0] for m in result.matches] == ["tail=none"]
    assert_same_bits(before, after)
