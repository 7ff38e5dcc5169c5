"""Fusion of DeepSeek-V4's attention output: inverse RoPE + grouped projection."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.graph_tools import aten, calls
from pagebinder.passes.fuse_inverse_rope_linear import fuse_inverse_rope_linear
from pagebinder.passes.fuse_q_norm_rope import fuse_q_norm_rope
from tests.graphs import assert_metadata_kept, captured, count, run
from tests.passes.v4_bodies import (
    DTYPES,
    FUSED_OUT,
    FUSED_Q,
    GROUPS,
    HEAD_DIM,
    NORM,
    ROPE,
    WIDTH,
    Model,
    assert_refused,
    assert_same_bits,
    fused,
    grouped,
    heads,
    norm,
    project,
    rotate_tail,
    styled,
)


def projected(model, x, cos, sin):
    return project(model, heads(x), cos, sin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inverse_rotation_and_projection_become_one_op(dtype):
    before, after, result = fused(projected, fuse_inverse_rope_linear, dtype)
    assert count(after, FUSED_OUT) == 1 and count(after, ROPE, aten.bmm.default, aten.neg.default) == 0
    assert len(result.matches) == 1 and not result.refusals and result.changed
    assert result.matches[0].module_path == "body"
    assert_metadata_kept(after, FUSED_OUT)
    (node,) = calls(after.graph, FUSED_OUT)
    assert node.kwargs == {"groups": GROUPS, "fp8": False} and node.args[3].op == "get_attr"
    assert list(node.meta["val"].shape)[1:] == [GROUPS * 24] and node.meta["val"].dtype is dtype
    assert_same_bits(before, after)


def test_fp8_is_asked_for_and_stays_close():
    before, after, result = fused(projected, lambda gm: fuse_inverse_rope_linear(gm, fp8=True))
    (node,) = calls(after.graph, FUSED_OUT)
    assert len(result.matches) == 1 and node.kwargs["fp8"]
    expected, got = run(before, 9), run(after, 9)
    assert not torch.equal(expected, got)
    assert (got - expected).norm() < 0.04 * expected.norm()


def test_the_attention_output_keeps_its_other_users():
    def body(model, x, cos, sin):
        out = heads(x).sin()
        return project(model, out, cos, sin) + out.sum((-1, -2)).unsqueeze(-1)

    before, after, result = fused(body, fuse_inverse_rope_linear)
    assert len(result.matches) == 1
    assert_same_bits(before, after)


def test_two_layers_of_everything():
    """Queries and output of two layers, over one pair of tables."""

    def body(model, x, cos, sin):
        for _ in range(2):
            out = project(model, rotate_tail(norm(heads(x)), cos, sin), cos, sin)
            x = x + out.sum(-1, keepdim=True)
        return x

    before, after, result = fused(body, fuse_inverse_rope_linear, torch.bfloat16)
    assert len(result.matches) == 2 and not result.refusals
    assert len(fuse_q_norm_rope(after).matches) == 2
    assert count(after, FUSED_OUT, FUSED_Q) == 4 and count(after, ROPE, NORM) == 0
    assert len({node.args[1:3] for node in calls(after.graph, FUSED_Q, FUSED_OUT)}) == 1
    assert_same_bits(before, after)


def uneven(model, x, cos, sin):
    """Three and five quarters of the heads would be groups: 2 groups of 1.5 heads."""
    turned = rotate_tail(x[..., : 3 * HEAD_DIM].unflatten(-1, (3, HEAD_DIM)), cos, -sin)
    return grouped(turned.reshape(1, -1, GROUPS, 96), model.o_a[:, :96])


def read_twice(model, x, cos, sin):
    turned = rotate_tail(heads(x), cos, -sin)
    return grouped(turned.reshape(1, -1, GROUPS, WIDTH // GROUPS), model.o_a) + turned.sum(
        (-1, -2)
    ).unsqueeze(-1)


def whole(model, x, cos, sin):
    return rotate_tail(heads(x), cos, -sin).flatten(2) @ torch.ones(WIDTH, 5)


def chunked(model, x, cos, sin):
    turned = styled(heads(x), cos, -sin)
    return grouped(turned.reshape(1, -1, GROUPS, WIDTH // GROUPS), model.o_a)


def forward(model, x, cos, sin):
    turned = rotate_tail(heads(x), cos, sin)
    return grouped(turned.reshape(1, -1, GROUPS, WIDTH // GROUPS), model.o_a)


REFUSED_OUT = {
    "not read by one grouped product": read_twice,
    "not read by one grouped product ": whole,
    "not made of whole heads": uneven,
    "style chunked": chunked,
    "sin is not negated": forward,
    "not a parameter": lambda m, x, c, s: project(m, heads(x), c, s, m.o_a * 2),
}


@pytest.mark.parametrize("reason", REFUSED_OUT)
def test_near_misses_of_the_output_are_refused(reason):
    before, after, result = fused(REFUSED_OUT[reason], fuse_inverse_rope_linear)
    assert count(after, FUSED_OUT) == 0
    assert_refused(result, reason.strip())
    assert_same_bits(before, after)


def test_fp8_of_groups_that_cannot_be_quantised_is_refused():
    def body(model, x, cos, sin):
        turned = rotate_tail(heads(x)[:, :, :2, :48], cos, -sin)
        return grouped(turned.reshape(1, -1, GROUPS, 48), model.small)

    class Small(Model):
        def __init__(self, function):
            super().__init__(function)
            self.small = nn.Parameter(torch.ones(GROUPS * 8, 48))

    torch.manual_seed(0)
    gm = captured(Small(body), width=WIDTH)
    assert_refused(fuse_inverse_rope_linear(gm, fp8=True), "quantised by 128")
    assert len(fuse_inverse_rope_linear(gm).matches) == 1
