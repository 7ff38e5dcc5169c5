"""Equal calls are made once."""

from __future__ import annotations

import torch

from pagebinder.graph_tools import aten
from pagebinder.passes.share_values import share_values
from tests.graphs import captured, clone, count, run


def shared(function):
    before = captured(function)
    after = clone(before)
    result = share_values(after)
    after.graph.lint()
    for num_tokens in (1, 9):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))
    return before, after, result


def test_equal_calls_become_one_and_so_do_those_behind_them():
    def function(x, positions):
        angles = positions[..., None].float() * 0.5
        return x * angles.cos().repeat_interleave(16, -1) + x.exp() * angles.cos().repeat_interleave(16, -1)

    before, after, result = shared(function)
    assert count(before, aten.cos.default) == 2 and count(after, aten.cos.default) == 1
    assert count(after, aten.repeat_interleave.self_int) == 1
    assert [m.detail for m in result.matches] == ["aten.cos.default", "aten.repeat_interleave.self_int"]


def test_other_numbers_and_options_are_other_calls():
    def function(x, positions):
        ones = torch.ones(x.shape[-1])
        return x + ones + (x * 1.0).floor() + (x * -0.0) + (x * 0.0) + x.sum(-1, keepdim=True) + x.sum(0)

    before, after, _ = shared(function)
    assert count(after, aten.mul.Tensor) == count(before, aten.mul.Tensor)
    assert count(after, aten.sum.dim_IntList) == 2


def test_results_of_a_call_are_told_apart():
    def function(x, positions):
        values, places = x.topk(2)
        again, _ = x.topk(2)
        return values + again * places

    _, after, _ = shared(function)
    assert count(after, aten.topk.default) == 1


def test_random_numbers_are_drawn_as_often_as_before():
    def function(x, positions):
        return x * 0 + torch.rand_like(x) * 0 + torch.rand_like(x) * 0

    before = captured(function)
    after = clone(before)
    share_values(after)
    assert count(after, aten.rand_like.default) == count(before, aten.rand_like.default) == 2
