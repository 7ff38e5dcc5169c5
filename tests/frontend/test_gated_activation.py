"""act(gate) * up -> pagebinder.gated_activation, bit for bit; other products with an activation are refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from pagebinder.custom_ops.activation.gated_activation import ACTIVATIONS, gated_activation_reference
from pagebinder.frontend.recognise import recognise_gated_activation
from pagebinder.graph_tools import calls
from tests.graphs import WIDTH, assert_metadata_kept, captured, clone, count, run

GATED = torch.ops.pagebinder.gated_activation.default
HALF = WIDTH // 2

FORMS = {
    "silu": lambda x: F.silu(x) * x.cos(),
    "gelu": lambda x: F.gelu(x) * x.cos(),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh") * x.cos(),
    "relu": lambda x: F.relu(x) * x.cos(),
    "relu2": lambda x: F.relu(x).pow(2) * x.cos(),
    "relu2 by square": lambda x: F.relu(x).square() * x.cos(),
    "sigmoid": lambda x: torch.sigmoid(x) * x.cos(),
    "silu, up first": lambda x: x.cos() * F.silu(x),
    "silu, halves of one projection": lambda x: F.silu(x[..., :HALF]) * x[..., HALF:],
    "silu, chunks": lambda x: (lambda gate, up: up * F.silu(gate))(*x.chunk(2, dim=-1)),
}


def recognised(function, dtype=torch.float32):
    before = captured(lambda x, positions: function(x), dtype=dtype)
    after = clone(before)
    return before, after, recognise_gated_activation(after)


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_recognised_and_keep_every_bit(form):
    for dtype in (torch.float32, torch.bfloat16):
        before, after, result = recognised(FORMS[form], dtype)
        assert [m.detail for m in result.matches] == [f"activation={form.split(',')[0].split()[0]}"]
        assert count(after, GATED) == 1 and not result.refusals
        assert_metadata_kept(after, GATED)
        assert torch.equal(run(after, 20), run(before, 20))


NEAR_MISSES = {
    "several places": lambda x: (a := F.silu(x)) * x.cos() + a,
    "several places ": lambda x: (a := F.silu(x)) * x.cos() + a * x.sin(),
    "by a number": lambda x: F.silu(x) * 2.0,
    "by itself": lambda x: (a := F.silu(x)) * a,
    "differ in shape": lambda x: F.silu(x[..., :1]) * x,
    "is torch.float32": lambda x: F.silu(x.float()) * x,
    "tokens are the last dimension": lambda x: (F.silu(x.mT) * x.mT.cos()).mT,
}


@pytest.mark.parametrize("reason", NEAR_MISSES)
def test_other_products_are_refused_with_the_reason(reason):
    before, after, result = recognised(NEAR_MISSES[reason], torch.bfloat16)
    assert not result.matches and count(after, GATED) == 0
    (refusal,) = result.refusals
    assert reason.strip() in refusal.reason and refusal.module_path == "body"
    assert torch.equal(run(after, 20), run(before, 20))


def test_an_activation_without_a_gate_is_nothing_to_speak_of():
    _, _, result = recognised(lambda x: F.gelu(x) + 1)
    assert not result.matches and not result.refusals


def test_a_chain_of_two():
    def twice(x):
        y = F.silu(x) * x.cos()
        return F.relu(y) * y

    before, after, result = recognised(twice)
    assert [m.detail for m in result.matches] == ["activation=silu", "activation=relu"]
    assert torch.equal(run(after, 20), run(before, 20))
    assert [n.kwargs["activation"] for n in calls(after.graph, GATED)] == ["silu", "relu"]


def test_the_op_knows_its_activations():
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    for name, function in ACTIVATIONS.items():
        torch.testing.assert_close(GATED(gate, up, activation=name), function(gate) * up, rtol=0, atol=0)
    with pytest.raises(ValueError, match="swish.*one of silu"):
        gated_activation_reference(gate, up, activation="swish")
