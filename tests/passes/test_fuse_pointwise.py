"""Pointwise operations of torch -> one call each, without changing a bit of what is rounded alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from pagebinder.custom_ops.pointwise.program import read_program
from pagebinder.graph_tools import calls
from pagebinder.passes.fuse_pointwise import fuse_pointwise
from tests.graphs import WIDTH, captured, clone, count, run

POINTWISE = torch.ops.pagebinder.pointwise.default


class Body(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.table = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x, positions):
        return self.function(x, self.scale, self.table)


def fused(function, dtype=torch.float32):
    before = captured(Body(function), dtype=dtype)
    after = clone(before)
    result = fuse_pointwise(after)
    after.graph.lint()
    for num_tokens in (1, 9):
        expected, got = run(before, num_tokens), run(after, num_tokens)
        assert got.dtype is expected.dtype and torch.equal(got, expected)
    return after, result


def programs(gm) -> list[list[str]]:
    """The operations of each call."""
    return [[s.operation for s in read_program(n.args[1]).statements] for n in calls(gm.graph, POINTWISE)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_is_one_call(dtype):
    gm, result = fused(lambda x, scale, _: 30 * torch.tanh((x * scale + 1) / 30), dtype)
    assert programs(gm) == [["mul", "add", "div", "tanh", "mul"]]
    assert len(result.matches) == 1 and not result.refusals and result.changed
    assert result.matches[0].detail == "5 operations: mul, add, div, tanh"


def test_what_is_read_elsewhere_is_a_result_too():
    def function(x, scale, table):
        wide = x * scale + x
        return functional.linear(wide.exp(), table) + wide

    gm, _ = fused(function)
    assert programs(gm) == [["mul", "add", "exp"], ["add"]]
    assert read_program(next(calls(gm.graph, POINTWISE)).args[1]).results == (1, 2)


def test_a_product_between_two_operations_parts_them():
    def function(x, scale, table):
        first = x * scale
        return functional.linear(first, table) + first.neg()

    gm, _ = fused(function)
    assert programs(gm) in ([["mul"], ["neg", "add"]], [["mul", "neg"], ["add"]])


def test_what_only_it_reads_is_made_where_it_is_broadcast():
    def function(x, scale, _):
        return x * -scale.exp() + functional.softplus(x)

    gm, _ = fused(function)
    (names,) = programs(gm)
    assert sorted(names) == ["add", "exp", "mul", "neg", "softplus"]


def test_a_small_value_that_others_read_stays_by_itself():
    def function(x, scale, table):
        small = scale.exp()
        return functional.linear(x * small, table * small)

    gm, _ = fused(function)
    assert sorted(programs(gm)) == [["exp"], ["mul"], ["mul"]]


def test_neighbours_of_one_shape_are_one_call():
    gm, _ = fused(lambda x, scale, _: torch.cat((x.sigmoid(), x * scale), dim=-1))
    assert programs(gm) == [["sigmoid", "mul"]]


def test_operations_of_several_dtypes_are_one_call():
    gm, _ = fused(
        lambda x, scale, _: (x.float() * torch.sigmoid(scale.float())).to(x.dtype) + 1, torch.bfloat16
    )
    assert count(gm, POINTWISE) == 1
    node = next(calls(gm.graph, POINTWISE))
    assert {s.dtype for s in read_program(node.args[1]).statements} == {"float32", "bfloat16"}


def test_choices_limits_and_squares():
    def function(x, scale, _):
        mask = (x > 0.25) & ~(x >= 1)
        y = torch.where(mask, x.clamp(-1, 0.5), -x)
        return (
            y.masked_fill(mask, 2.0)
            + x.pow(2)
            + x.pow(3)
            + torch.minimum(x, scale)
            + functional.relu(x).square()
        )

    for dtype in (torch.float32, torch.bfloat16):
        gm, _ = fused(function, dtype)
        assert count(gm, POINTWISE) == 1, programs(gm)


def test_numbers_are_rounded_as_torch_rounds_them():
    """Of sums to the operand's dtype, of products not: by who runs the program."""
    gm, _ = fused(lambda x, *_: ((x + 0.3371) * 0.3371 - 1 / 3).masked_fill(x > 0.3371, 0.1), torch.bfloat16)
    statements = read_program(next(calls(gm.graph, POINTWISE)).args[1]).statements
    assert [s.dtype for s in statements] == ["bfloat16"] * 5
    assert [s.operands[1] for s in statements] == [0.3371, 0.3371, 1 / 3, 0.3371, 0.1]


def test_what_has_no_form_is_left_alone():
    def function(x, scale, _):
        rounded = torch.div(x, 0.3, rounding_mode="floor")
        added = torch.add(x, scale, alpha=2)
        return rounded + added + x.cos() + (x.long() + 1) + x.abs().pow(1.5)

    gm, _ = fused(function)
    left = {str(n.target) for n in gm.graph.nodes if n.op == "call_function"}
    assert {"aten.div.Tensor_mode", "aten.cos.default"} <= left
    assert {"aten.pow.Tensor_Scalar", "aten.add.Tensor"} <= left  # of integers, and with a factor


def test_a_cast_of_a_weight_is_left_to_those_who_look_for_it():
    gm, result = fused(lambda x, _, table: functional.linear(x, table.double().float()))
    assert not result.matches and not result.changed and count(gm, POINTWISE) == 0


def test_long_runs_are_cut():
    def function(x, scale, _):
        for _ in range(60):
            x = x * 0.5 + scale
        return x

    gm, _ = fused(function)
    lengths = [len(names) for names in programs(gm)]
    assert sum(lengths) == 120 and max(lengths) <= 40 and len(lengths) <= 4


def test_a_copy_that_is_reshaped_is_viewed():
    gm, _ = fused(lambda x, *_: (x * 2).transpose(0, 1).reshape(-1, WIDTH // 2) + 1)
    assert count(gm, torch.ops.aten._unsafe_view.default) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_lie_as_torchs_do(dtype):
    """Along channels, as a convolution's: a view behind it needs that."""

    def function(x, scale, _):
        across = x.transpose(1, 2) * scale[:, None] + x.transpose(1, 2).sigmoid()
        return across.transpose(1, 2).view(-1, WIDTH // 2, 2) * across.exp().transpose(1, 2).view(
            -1, WIDTH // 2, 2
        )

    gm, _ = fused(function, dtype)
    assert [sorted(names) for names in programs(gm)] == [["add", "mul", "sigmoid"], ["exp"], ["mul"]]
    assert count(gm, torch.ops.aten.permute.default) > 0


def test_values_that_are_not_dense_are_left_alone():
    def function(x, *_):
        kept = torch.empty_strided((4, WIDTH), (2 * WIDTH, 1), device=x.device)
        return x + kept.zero_().exp().sum()

    gm, _ = fused(function)
    assert count(gm, torch.ops.aten.exp.default) in (0, 1)
