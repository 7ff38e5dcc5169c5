"""Linear layers of the same value in one op, and gated ones with their gate, plain and quantised: structure, values,
refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.frontend.recognise import recognise_gated_activation
from pagebinder.graph_tools import calls
from pagebinder.passes.fuse_gated_linear import fuse_gated_linear
from pagebinder.passes.fuse_quantized_linear import fuse_quantized_linear
from pagebinder.passes.merge_linears import merge_linears
from pagebinder.passes.place_linears import place_linears
from pagebinder.passes.quantize_weights import quantize_weights
from tests.graphs import assert_metadata_kept, captured, clone, count, run

WIDTH = 64
OURS = torch.ops.pagebinder
# of the weights (None: plain) -> the name that ops of such layers begin with
PREFIXES = {None: "", "int8": "quantized_", "int4_g32": "quantized_", "fp8": "quantized_"}
every_format = pytest.mark.parametrize("format", PREFIXES)
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


def prepared(body, format=None, dtype=torch.bfloat16):
    gm = captured(body, width=WIDTH, dtype=dtype)
    recognise_gated_activation(gm)
    if format is not None:
        quantize_weights(gm, format=format)
        fuse_quantized_linear(gm)
    place_linears(gm)
    return gm


def op(name, format):
    return getattr(OURS, PREFIXES[format] + name).default


def weights_read(gm):
    return {n.target for n in gm.graph.nodes if n.op == "get_attr"}


@every_format
def test_siblings_become_one_call_that_reads_their_own_weights(format):
    before = prepared(Siblings(), format)
    after = clone(before)
    result = merge_linears(after)
    assert [m.detail for m in result.matches] == ["3 layers"] and not result.refusals
    assert count(after, op("linears", format)) == 1 and count(after, op("linear", format)) == 1
    assert_metadata_kept(after, op("linears", format))
    assert weights_read(after) == weights_read(before)
    for num_tokens in (1, 9):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))


@every_format
def test_siblings_of_which_some_have_a_bias_are_refused(format):
    gm = prepared(Siblings(biases=(True, False, True)), format)
    result = merge_linears(gm)
    assert not result.matches and "some have not" in result.refusals[0].reason


def test_siblings_in_other_formats_stay_apart():
    """The rows of one of three are no multiple of 32, so it keeps its plain weight."""
    body = Siblings()
    body.parts[1] = nn.Linear(WIDTH, 40)
    gm = prepared(body, "int8")
    assert count(gm, op("linear", "int8")) == 3 and merge_linears(gm).matches[0].detail == "2 layers"


@every_format
def test_a_gated_layer_becomes_one_call(format):
    before = prepared(Gated(), format)
    after = clone(before)
    result = fuse_gated_linear(after)
    assert len(result.matches) == 1 and not result.refusals
    assert count(after, op("gated_linear", format)) == 1
    assert count(after, op("linear", format), OURS.gated_activation.default) == 0
    assert_metadata_kept(after, op("gated_linear", format))
    assert weights_read(after) == weights_read(before)
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
@every_format
def test_near_misses_of_gated_layers_are_refused(body, reason, format):
    gm = prepared(body, format)
    result = fuse_gated_linear(gm)
    assert not result.matches and reason in result.refusals[0].reason


def test_a_gated_layer_of_two_formats_is_refused():
    gm = prepared(Gated(), "int8")
    up = list(calls(gm.graph, op("linear", "int8")))[1]
    up.update_kwarg("format", "fp8")
    result = fuse_gated_linear(gm)
    assert not result.matches and "different formats: int8 and fp8" in result.refusals[0].reason


def test_quantised_layers_in_float16_are_refused():
    gated, siblings = (prepared(body, "int8", torch.float16) for body in (Gated(), Siblings()))
    assert "bfloat16 and float32" in fuse_gated_linear(gated).refusals[0].reason
    assert merge_linears(siblings).matches  # which have kernels


@pytest.mark.parametrize(
    ("join", "body"), [(fuse_gated_linear, Gated), (merge_linears, Siblings)], ids=["gated", "siblings"]
)
def test_quantised_layers_without_a_kernel_that_joins_them_are_refused(join, body, monkeypatch):
    gm = prepared(body(), "int8")
    monkeypatch.setattr(registered_providers()["cpu"], "reasons_against", lambda need: ["none today"])
    result = join(gm)
    assert not result.matches and "none today" in result.refusals[0].reason
