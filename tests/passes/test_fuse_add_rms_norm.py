"""Residual add + RMSNorm -> one op with two results, without changing a bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.frontend.recognise import recognise_rms_norm
from pagebinder.graph_tools import aten, calls
from pagebinder.passes.fuse_add_rms_norm import fuse_add_rms_norm
from pagebinder.passes.simplify import simplify
from tests.graphs import WIDTH, assert_metadata_kept, captured, clone, count, run

FUSED = torch.ops.pagebinder.add_rms_norm.default
NORM = torch.ops.pagebinder.rms_norm.default


class Norm(nn.Module):
    def __init__(self, cast_first=True):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.cast_first = cast_first

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype) if self.cast_first else (self.weight.float() * wide).to(x.dtype)


class Body(nn.Module):
    """function(x, norms)"""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.norms = nn.ModuleList([Norm(), Norm(cast_first=False)])

    def forward(self, x, positions):
        return self.function(x, *self.norms)


def fused(function, dtype=torch.float32):
    before = captured(Body(function), dtype=dtype)
    recognise_rms_norm(before)
    simplify(before)
    after = clone(before)
    return before, after, fuse_add_rms_norm(after)


def assert_same_bits(before, after):
    for num_tokens in (1, 9):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_and_its_norm_become_one_op(dtype):
    before, after, result = fused(lambda x, norm, _: norm(x + x.sin()), dtype)
    assert count(after, FUSED) == 1 and count(after, NORM, aten.add.Tensor) == 0
    assert len(result.matches) == 1 and not result.refusals and result.changed
    assert result.matches[0].module_path == "body.norms.0"
    assert_metadata_kept(after, FUSED)
    assert [v.dtype for v in next(calls(after.graph, FUSED)).meta["val"]] == [dtype, dtype]
    assert_same_bits(before, after)


def test_the_sum_keeps_its_other_users():
    def body(x, norm, _):
        h = x + x.sin()
        early = h.exp()  # uses the sum before it is normalised
        return norm(h) * early + h.cos() + h

    before, after, result = fused(body)
    assert len(result.matches) == 1 and count(after, FUSED) == 1
    assert_same_bits(before, after)


def test_a_chain_of_two_layers():
    def body(x, first, second):
        h = x + x.sin()
        h = h + first(h).cos()
        return second(h) + h

    before, after, result = fused(body, torch.bfloat16)
    assert count(after, FUSED) == 2 and count(after, NORM) == 0 and not result.refusals
    assert [n.kwargs["tail"] for n in calls(after.graph, FUSED)] == ["cast_scale", "scale_cast"]
    assert_same_bits(before, after)


def test_a_value_added_to_itself():
    before, after, result = fused(lambda x, norm, _: norm(x + x))
    assert len(result.matches) == 1
    assert_same_bits(before, after)


REFUSED = {
    "not a sum": lambda x, norm, _: norm(x * x.sin()),
    "a factor or a literal": lambda x, norm, _: norm(torch.add(x, x.sin(), alpha=2)),
    "a factor or a literal ": lambda x, norm, _: norm(x + 1.0),
    "differ in shape": lambda x, norm, _: norm(x + x.mean(-1, keepdim=True)),
    "normalised more than once": lambda x, norm, other: norm(h := x + x.sin()) * other(h),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_near_misses_are_refused_with_the_reason(reason):
    before, after, result = fused(REFUSED[reason])
    assert count(after, FUSED) == 0 and not result.changed
    for refusal in result.refusals:
        assert reason.strip() in refusal.reason
        assert refusal.module_path.startswith("body.norms.")
        assert "test_fuse_add_rms_norm.py:" in refusal.source_line
    assert result.refusals
    assert_same_bits(before, after)


def test_terms_of_different_dtypes_are_refused():
    before, after, result = fused(lambda x, norm, _: norm(x + x.sin().float()), torch.bfloat16)
    assert not result.matches and "differ in shape or dtype" in result.refusals[0].reason
    assert_same_bits(before, after)


def test_a_weight_that_is_computed_after_the_sum_is_refused():
    """A bfloat16 weight widened beside the norm: the fused op would stand before the weight."""

    class Widened(Norm):
        def forward(self, x):
            wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight.float() * wide.to(x.dtype)

    widened = Widened()

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = widened

        def forward(self, x, positions):
            return self.norm(x + x.sin())

    before = captured(Holder(), dtype=torch.bfloat16)
    recognise_rms_norm(before)
    after = clone(before)
    result = fuse_add_rms_norm(after)
    if count(before, NORM):
        assert "weight is computed" in result.refusals[0].reason
    assert_same_bits(before, after)
