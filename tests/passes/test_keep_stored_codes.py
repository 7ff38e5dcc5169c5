"""Experts that were stored in mxfp4 and expanded by a loader: their codes are found again, and no number changes."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.linear.weight_formats import dequantize
from pagebinder.custom_ops.linear.weight_stacks import dequantize_stack, quantize_stack
from pagebinder.graph_tools import attribute
from pagebinder.passes.fuse_quantized_linear import fuse_quantized_linear
from pagebinder.passes.keep_stored_codes import keep_stored_codes
from tests.graphs import captured, clone, count, run
from tests.passes.test_quantize_experts import DEQUANTIZE, MIXTURE, QUANTIZED, WIDTH, Mixture
from tests.tolerances import assert_close

STORED = {"body": "mxfp4"}


def stored_mixture(**options) -> Mixture:
    """One whose weights are numbers of mxfp4."""
    mixture = Mixture(**options)
    with torch.no_grad():
        for weight in (mixture.up, mixture.down):
            values = dequantize_stack(*quantize_stack(weight, "mxfp4", mixture.transposed), "mxfp4")
            weight.copy_(values.mT if mixture.transposed else values)
    return mixture


def kept(before, stored=STORED):
    after = clone(before)
    return after, keep_stored_codes(after, stored=stored)


@pytest.mark.parametrize("transposed", [False, True], ids=["[E, N, K]", "[E, K, N]"])
def test_codes_are_found_again_and_no_number_changes(transposed):
    before = captured(stored_mixture(transposed=transposed), width=WIDTH)
    after, result = kept(before)
    assert [m.detail for m in result.matches] == ["mxfp4 as stored"] and not result.refusals
    assert count(after, DEQUANTIZE) == 2 and result.changed and not result.changes_numbers
    for num_tokens in (1, 9):
        got, expected = run(after, num_tokens), run(before, num_tokens)
        assert_close(got, expected)
        assert transposed or torch.equal(got, expected)  # a product of turned weights adds in another order
    codes, scale = (attribute(after, f"body.up_mxfp4_{part}") for part in ("codes", "scale"))
    values = dequantize(codes[0], scale[0], "mxfp4")
    weight = attribute(before, "body.up")[0]
    assert torch.equal(values, weight.mT if transposed else weight)
    fuse_quantized_linear(after)
    assert count(after, QUANTIZED) == 1 and not count(after, MIXTURE)
    assert_close(run(after, 9), run(before, 9))


@pytest.mark.parametrize(
    ("mixture", "reason"),
    [
        (Mixture(), "not numbers of mxfp4"),
        (stored_mixture(inner=96).requires_grad_(False), None),
        (Mixture(inner=48), "multiples of 32"),
    ],
    ids=["other numbers", "sizes that fit", "sizes that cannot be packed"],
)
def test_what_cannot_be_kept_stays_as_it_was_loaded(mixture, reason):
    before = captured(mixture, width=WIDTH)
    after, result = kept(before)
    if reason is None:
        assert result.matches and not result.refusals
        return
    assert not result.changed and not count(after, DEQUANTIZE) and count(after, MIXTURE) == 1
    (refusal,) = result.refusals
    assert reason in refusal.reason and refusal.module_path


@pytest.mark.parametrize("stored", [{}, {"body": "mxfp8"}, {"bod": "mxfp4"}])
def test_experts_that_were_stored_otherwise_are_left_alone(stored):
    after, result = kept(captured(stored_mixture(), width=WIDTH), stored)
    assert not result.matches and not result.refusals and count(after, MIXTURE) == 1
    weights_computed = captured(Mixture(scaled=True), width=WIDTH)
    assert not kept(weights_computed)[1].matches
