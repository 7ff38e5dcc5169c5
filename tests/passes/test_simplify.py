"""No-op casts and views that undo each other disappear; everything else stays."""

from __future__ import annotations

import pytest
import torch

from pagebinder.graph_tools import aten, calls, num_ops
from pagebinder.passes.simplify import simplify
from tests.graphs import assert_metadata_kept, captured, clone, count, run


def simplified(body, dtype=torch.float32):
    before = captured(body, dtype=dtype)
    after = clone(before)
    return before, after, simplify(after)


REMOVED = {
    "cast to its own dtype": (lambda x, p: x.to(torch.float32) * 2, 1),
    "a chain of casts": (lambda x, p: x.float().to(torch.float32).float() * 2, 3),
    "detach": (lambda x, p: x.detach() * 2, 1),
    "two transposes": (lambda x, p: x.transpose(1, 2).transpose(1, 2) * 2, 1),
    "two transposes, dimensions in another order": (lambda x, p: x.transpose(-1, 1).transpose(1, 2) * 2, 1),
    "select of what unsqueeze added": (lambda x, p: x.unsqueeze(0)[0] * 2, 1),
    "a product with one": (lambda x, p: (x * 1.0).sin() + x, 1),
    "a product with the number one": (lambda x, p: (x * 1).sin() + x, 1),
    "a division by one": (lambda x, p: (x / 1.0).sin() + x, 1),
    "a dropout outside training": (lambda x, p: torch.dropout(x, 0.1, False).sin() + x, 1),
    "transposes around a cast": (lambda x, p: x.transpose(1, 2).float().transpose(1, 2) * 2, 2),
}


@pytest.mark.parametrize("name", REMOVED)
def test_what_changes_nothing_is_removed(name):
    body, num_matches = REMOVED[name]
    before, after, result = simplified(body)
    assert len(result.matches) == num_matches and result.changed
    assert num_ops(after) < num_ops(before)
    assert count(after, aten.to.dtype, aten.transpose.int, aten.detach.default) == 0
    assert all(m.module_path == "body" for m in result.matches)
    assert_metadata_kept(after, aten.mul.Tensor)
    assert torch.equal(run(before, 9), run(after, 9))


CONTIGUOUS = torch.contiguous_format
KEPT = {
    "a cast to another dtype": lambda x, p: x.to(torch.bfloat16).float(),
    "a cast that asks for a layout": lambda x, p: x.transpose(1, 2).to(torch.float32, memory_format=CONTIGUOUS),
    "a product with almost one": lambda x, p: x * 1.0000001 * 2,
    "a product with one that makes floats of integers": lambda x, p: x.int() * 1.0 + x,
    "a dropout in training": lambda x, p: torch.dropout(x, 0.0, True) * 2,
    "one transpose": lambda x, p: x.transpose(1, 2) * 2,
    "two different transposes": lambda x, p: x.unsqueeze(0).transpose(0, 1).transpose(0, 2),
    "select of the first of two": lambda x, p: torch.stack((x, x + 1))[0],
    "select elsewhere than unsqueeze": lambda x, p: x.unsqueeze(2)[0],
    "a contiguous copy": lambda x, p: x.transpose(1, 2).contiguous(),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_changes_something_is_kept(name):
    before, after, result = simplified(KEPT[name])
    kinds = (
        aten.to.dtype,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.contiguous.default,
        aten.clone.default,
        aten.mul.Tensor,
    )
    assert count(after, *kinds) == count(before, *kinds)
    assert torch.equal(run(before, 9), run(after, 9))
    assert run(before, 9).stride() == run(after, 9).stride()
    assert all(m.pattern == "no_op" for m in result.matches)


def test_a_removed_node_with_several_users():
    before, after, result = simplified(
        lambda x, p: (y := x.transpose(1, 2).transpose(2, 1)) * 2 + y.exp() * y
    )
    assert len(result.matches) == 1 and count(after, aten.transpose.int) == 0
    assert torch.equal(run(before, 9), run(after, 9))


def test_an_inner_transpose_with_another_user_stays():
    before, after, _ = simplified(lambda x, p: (y := x.transpose(1, 2)).transpose(1, 2) * y.exp().sum())
    assert count(after, aten.transpose.int) == 1
    assert torch.equal(run(before, 9), run(after, 9))


def test_nothing_to_do_is_said():
    _, after, result = simplified(lambda x, p: x.exp())
    assert not result.matches and not result.changed
    assert next(calls(after.graph, aten.exp.default))
