"""Activations in fp8: which layers get codes, whose scale they get, and what is fused with making them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pagebinder.passes.quantize_activations as passes
from pagebinder.custom_ops.fp8.quant import dequantise
from pagebinder.errors import ConfigError, VerificationError
from pagebinder.frontend.recognise import recognise_gated_activation, recognise_rms_norm
from pagebinder.graph_tools import attribute, calls
from pagebinder.passes.fuse_add_rms_norm import fuse_add_rms_norm
from pagebinder.passes.fuse_gated_activation_fp8_quant import fuse_gated_activation_fp8_quant
from pagebinder.passes.fuse_quantized_linear import fuse_quantized_linear
from pagebinder.passes.fuse_rms_norm_fp8_quant import fuse_rms_norm_fp8_quant
from pagebinder.passes.quantize_activations import certify_activations, quantize_activations
from pagebinder.passes.quantize_weights import quantize_weights
from pagebinder.passes.simplify import simplify
from tests.graphs import assert_metadata_kept, captured, clone, count, run

WIDTH, MIDDLE = 160, 192
ours = torch.ops.pagebinder
QUANT, LINEAR = ours.scaled_fp8_quant.default, ours.fp8_linear.default
NORM, ADD_NORM = ours.rms_norm_fp8_quant.default, ours.add_rms_norm_fp8_quant.default
GATED = ours.gated_activation_fp8_quant.default
GRANULARITIES = ("tensor", "token", "group")


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    """Two norms, one of them of a sum; a gated MLP; and `last`, in the place of an LM head. `twist` may spoil it."""

    def __init__(self, twist: str = ""):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.twist = Norm(), Norm(), twist
        self.q, self.k, self.o = (nn.Linear(WIDTH, WIDTH, bias=b) for b in (True, False, False))
        self.gate, self.up = (nn.Linear(WIDTH, MIDDLE, bias=False) for _ in range(2))
        self.down, self.last = nn.Linear(MIDDLE, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, x, positions):
        normed = self.first(x)
        h = x + self.o(self.q(normed).sin() + self.k(normed))
        y = self.second(h)
        gated = nn.functional.silu(self.gate(y)) * self.up(y)
        h = h + self.down(gated)
        if self.twist == "norm read twice":
            h = h + y
        if self.twist == "gate read twice":
            h = h + gated[..., :WIDTH]
        return self.last(h)


def prepared(body, weights="fp8", dtype=torch.bfloat16):
    gm = captured(body, width=WIDTH, dtype=dtype)
    for run_pass in (recognise_rms_norm, recognise_gated_activation, simplify, fuse_add_rms_norm):
        run_pass(gm)
    quantize_weights(gm, format=weights)
    fuse_quantized_linear(gm)
    return gm


def assert_same_bits(before, after):
    for num_tokens in (1, 9):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_and_then_what_feeds_them(granularity, dtype):
    before = prepared(Layer(), dtype=dtype)
    after = clone(before)
    result = quantize_activations(after, granularity=granularity)
    assert count(after, LINEAR) == 6 == len(result.matches)
    assert count(after, QUANT) == 4  # q and k, and gate and up, share what they read
    assert (
        result.changes_numbers and result.rounds_values and result.mixes_tokens == (granularity == "tensor")
    )
    assert ["LM head" in r.reason for r in result.refusals] == [True]
    assert_metadata_kept(after, LINEAR, QUANT)
    exact, quantised = run(before, 9).float(), run(after, 9).float()
    assert 0 < (quantised - exact).norm() < 0.06 * exact.norm()
    (certificate,) = certify_activations(before, after, result)
    assert certificate.count == 6 and 0 < certificate.max_rel_error < 0.05

    fused = clone(after)
    norms, gated = fuse_rms_norm_fp8_quant(fused), fuse_gated_activation_fp8_quant(fused)
    assert (len(norms.matches), len(gated.matches)) == (2, 1) and not norms.refusals + gated.refusals
    assert [count(fused, op) for op in (NORM, ADD_NORM, GATED, QUANT)] == [
        1,
        1,
        1,
        1,
    ]  # of `o`, nothing is known
    assert count(fused, ours.rms_norm.default, ours.add_rms_norm.default, ours.gated_activation.default) == 0
    assert {m.module_path for m in norms.matches} == {"body.first", "body.second"}
    assert not norms.changes_numbers and not gated.changes_numbers
    assert_metadata_kept(fused, NORM, ADD_NORM, GATED)
    assert_same_bits(after, fused)


@pytest.mark.parametrize(
    ("twist", "fuse", "matches"),
    [
        ("norm read twice", fuse_rms_norm_fp8_quant, 1),
        ("gate read twice", fuse_gated_activation_fp8_quant, 0),
    ],
)
def test_what_is_read_elsewhere_is_refused(twist, fuse, matches):
    before = prepared(Layer(twist))
    quantize_activations(before, granularity="token")
    after = clone(before)
    result = fuse(after)
    assert len(result.matches) == matches and ["read elsewhere" in r.reason for r in result.refusals] == [
        True
    ]
    assert "test_quantize_activations.py:" in result.refusals[0].source_line
    assert_same_bits(before, after)


def test_without_quantisation_norms_and_gates_are_refused():
    gm = prepared(Layer())
    for fuse in (fuse_rms_norm_fp8_quant, fuse_gated_activation_fp8_quant):
        result = fuse(gm)
        assert not result.matches and {r.reason for r in result.refusals} == {"its result is not quantised"}


def test_weights_in_other_formats_are_refused():
    gm = prepared(Layer(), weights="int8")
    result = quantize_activations(gm, granularity="token")
    assert not result.matches and "in int8, not in fp8" in result.refusals[0].reason


LAYERS = ("q", "k", "o", "gate", "up", "down")


def scales(**changed) -> dict[str, torch.Tensor]:
    found = {f"body.{name}.input_scale": torch.tensor(0.02 + 0.01 * i) for i, name in enumerate(LAYERS)}
    return found | {f"body.{name}.input_scale": torch.tensor(value) for name, value in changed.items()}


def test_static_scales_are_the_largest_of_those_who_share_them():
    before = prepared(Layer())
    quantize_activations(before, granularity="tensor", scales=scales(k=0.5))
    found = [attribute(before, n.args[1].target).tolist() for n in calls(before.graph, QUANT)]
    assert found == [[0.5], [pytest.approx(0.04)], [pytest.approx(0.06)], [pytest.approx(0.07)]]
    after = clone(before)
    results = [fuse(after) for fuse in (fuse_rms_norm_fp8_quant, fuse_gated_activation_fp8_quant)]
    assert [len(r.matches) for r in results] == [2, 1]
    assert_same_bits(before, after)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({k: v for k, v in scales().items() if "up" not in k}, "lack 'body.up.input_scale'"),
        (scales(down=0.0), "'body.down.input_scale' must be one positive number"),
        (scales(o=[1.0, 2.0]), "'body.o.input_scale' must be one positive number"),
    ],
)
def test_bad_scales_are_told(given, problem):
    with pytest.raises(ConfigError, match=problem):
        quantize_activations(prepared(Layer()), granularity="tensor", scales=given)


def test_wrong_codes_are_no_certificate(monkeypatch):
    before = prepared(Layer())
    after = clone(before)
    result = quantize_activations(after, granularity="token")
    monkeypatch.setattr(passes, "dequantise", lambda codes, scale: dequantise(codes, 1.1 * scale))
    with pytest.raises(VerificationError, match="more than the format explains"):
        certify_activations(before, after, result)
