"""Writes into tensors become calls that return new ones where that can be read off the graph, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from pagebinder.frontend.capture import _is_mutating
from pagebinder.frontend.out_of_place import write_out_of_place


class Body(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.register_buffer("kept", torch.arange(8.0))

    def forward(self, x):
        return self.run(self, x)


def exported(run):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    model = Body(run)
    expected = model(x.clone())
    program = torch.export.export(model, (x.clone(),), dynamic_shapes=({0: Dim("T", min=2, max=64)},))
    return program, x, expected


def writes(program) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if _is_mutating(n)]


def made(self, x):
    weights = x.topk(3)[0]
    weights.div_(weights.sum(-1, keepdim=True))
    return weights * 2


def twice(self, x):
    y = x + 1
    before = y * 3
    y.mul_(2).add_(x)
    y.clamp_(min=0.25)
    return y - before


def scattered(self, x):
    values, places = x.topk(2)
    return torch.full_like(x, float("-inf")).scatter_(1, places, values)


def view_read_before(self, x):
    y = x * 2
    total = y.view(-1).sum()
    y.add_(1)
    return y + total


def view_taken_behind(self, x):
    y = x * 2
    y.add_(1)
    return y.view(-1, 2)[:, 0] + y.t().reshape(-1)[: y.numel() // 2]


def copied(self, x):
    y = torch.zeros_like(x)
    y.copy_(x[0])
    return y + 1


def view_read_behind(self, x):
    y = x * 2
    flat = y.view(-1)
    y.add_(1)
    return y + flat.sum()


def part(self, x):
    y = x * 2
    y[:, 1].add_(1)
    return y


def entries_and_slices(self, x):
    angles = (x[None].expand(3, -1, -1) * 2).sin()
    first = angles[0]
    for k in (1, 2):
        first[..., slice(k, 6, 3)] = angles[k, ..., slice(k, 6, 3)]
    return torch.cat((first, first), -1) + angles[1:].sum()


def what_a_write_returns(self, x):
    y = x * 2
    last = y[:, 3].mul_(4)
    return last + y[:, 2] + y.sum(-1)


def parts_of_parts(self, x):
    y = x * 2
    left, whole = y[:, :4], y.t()
    left[1].add_(x[1, 4:])
    left[:, 1].zero_()
    y[0] = left[1, 1:].sum()
    return whole.t() - left.sum() + y


def moved_within(self, x):
    y = x * 2
    y[1] = y[0].clone()
    y[:, ::2].copy_(y[:, 1::2])
    return y


def all_of_a_permuted_view(self, x):
    y = (x[:, None] * 2).permute(2, 0, 1)
    y += x.t()[:, :, None]
    return y.permute(1, 2, 0)[:, 0]


def through_a_cast_to_its_own_dtype(self, x):
    y = x * 2
    same = y.to(x.dtype).type_as(x)
    same[:, 1:].add_(x[:, 1:])
    same[0].mul_(3)
    return same.sum() + y


def other_name(self, x):
    y = (x * 2).to(x.dtype)  # x * 2 itself
    kept = y.contiguous()
    y.add_(1)
    return kept + y


ALONE = [
    made, twice, scattered, view_read_before, view_taken_behind, copied, view_read_behind, part, entries_and_slices,
    what_a_write_returns, parts_of_parts, moved_within, all_of_a_permuted_view, through_a_cast_to_its_own_dtype,
    other_name,
]  # fmt: skip


@pytest.mark.parametrize("run", ALONE, ids=lambda run: run.__name__)
def test_writes_that_nobody_else_sees(run):
    program, x, expected = exported(run)
    assert writes(program)
    write_out_of_place(program.graph)
    assert not writes(program)
    program.graph.lint()
    assert torch.equal(program.module()(x), expected)
    assert torch.equal(program.run_decompositions({}).module()(x), expected)


def input_written(self, x):
    x.add_(1)
    return x * 2


def dropped(self, x):
    y = x * 2
    same = torch.nn.functional.dropout(y, 0.5, training=False)
    y.add_(1)
    return same


def through_a_view(self, x):
    y = x * 2
    y.view(-1).mul_(3)
    return y


def written_through_another_shape(self, x):
    y = x * 2
    y.view(-1, 4)[:, 0].add_(1)
    return y


SEEN = [through_a_view, input_written, written_through_another_shape]


@pytest.mark.parametrize("run", SEEN, ids=lambda run: run.__name__)
def test_writes_that_others_see_stay(run):
    program, x, expected = exported(run)
    before = writes(program)
    assert before
    write_out_of_place(program.graph)
    assert writes(program) == before
    assert torch.equal(program.run_decompositions({}).module()(x.clone()), expected)


def test_what_an_op_of_other_ops_returns_may_be_its_operand():
    program, _, _ = exported(dropped)  # torch's own decomposition takes `same` for a copy
    write_out_of_place(program.graph)
    assert writes(program) == ["aten.add_.Tensor"]


def wider(self, x):
    y = x.to(torch.bfloat16) * 2
    y.mul_(x.double())
    return y


def laid_out_otherwise(self, x):
    y = torch.empty_strided((4, 8), (1, 4))
    y.copy_(x[:1])
    return y.mul_(torch.ones(4, 8)).add_(1)


@pytest.mark.parametrize("run", [wider, laid_out_otherwise], ids=lambda run: run.__name__)
def test_a_write_keeps_dtype_and_strides(run):
    program, x, expected = exported(run)
    write_out_of_place(program.graph)
    found = program.run_decompositions({}).module()(x)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_dtypes_that_an_op_would_choose_otherwise_stay_writes():
    program, _, _ = exported(wider)
    write_out_of_place(program.graph)
    assert writes(program) == ["aten.mul_.Tensor"]
