"""Logits only of the rows asked for: the same values, and the LM head runs on those rows alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.graph_tools import aten, calls
from pagebinder.passes.gather_logits import gather_logits
from pagebinder.passes.simplify import simplify
from tests.graphs import WIDTH, assert_metadata_kept, captured, clone, count, run


class Head(nn.Module):
    """x -> layers -> linear -> after; `after` sees the logits and x."""

    def __init__(self, after=lambda logits, x: logits, before=lambda x: x):
        super().__init__()
        self.head = nn.Linear(WIDTH, 24)
        self.before, self.after = before, after

    def forward(self, x, positions):
        return self.after(self.head(self.before(x)), x)


def gathered(body):
    before = captured(body)
    simplify(before)  # as in the pipeline: what flat tokens need is undone
    after = clone(before)
    return before, after, gather_logits(after)


ROWS = [torch.tensor([6]), torch.tensor([0, 6, 3]), torch.arange(7), torch.tensor([2, 2])]
FOUND = {
    "plain": Head(),
    "float": Head(lambda y, x: y.double().float()),
    "soft cap": Head(lambda y, x: torch.tanh(y / 30.0) * 30.0),
    "scaled": Head(lambda y, x: y * 0.25 + 1.0),
    "flat before the head": Head(lambda y, x: y[None], lambda x: x[0]),
}
FALLBACK = {
    "no linear": lambda x, p: x.exp(),
    "mixed with something of all tokens": Head(lambda y, x: y * x.mean(-1, keepdim=True)),
    "logits used twice": Head(lambda y, x: y * torch.sigmoid(y)),
    "a softmax of the logits": Head(lambda y, x: y.softmax(-1)),
    "tokens before the batch": Head(lambda y, x: y.transpose(0, 1), lambda x: x.transpose(0, 1)),
    "selected from a tokens-first head": Head(lambda y, x: y[:, 0][None], lambda x: x.transpose(0, 1)),
}


def assert_rows_equal(before, after):
    expected = run(before, 7)
    for rows in ROWS:
        torch.testing.assert_close(run(after, 7, logits_rows=rows), expected[rows])


@pytest.mark.parametrize("name", FOUND)
def test_rows_are_gathered_before_the_head(name):
    before, after, result = gathered(FOUND[name])
    assert len(result.matches) == 1 and not result.refusals and result.changed
    assert result.matches[0].module_path == "body.head"
    (head,) = calls(after.graph, aten.linear.default)
    assert head.args[0].target is aten.index_select.default
    assert_metadata_kept(after, aten.index_select.default, aten.linear.default)
    assert_rows_equal(before, after)


def test_values_know_the_new_number_of_rows():
    before, after, _ = gathered(FOUND["soft cap"])
    tokens = next(n for n in after.graph.nodes if n.target == "input_ids").meta["val"].shape[0]
    rows = next(n for n in after.graph.nodes if n.target == "logits_rows").meta["val"].shape[0]
    output = next(n for n in after.graph.nodes if n.op == "output").args[0]
    assert rows.node.expr != tokens.node.expr
    assert output.meta["val"].shape[0].node.expr == rows.node.expr
    assert next(calls(before.graph, aten.linear.default)).meta["val"].shape[1].node.expr == tokens.node.expr


@pytest.mark.parametrize("name", FALLBACK)
def test_without_a_plain_head_the_finished_logits_are_gathered(name):
    before, after, result = gathered(FALLBACK[name])
    assert not result.matches and count(after, aten.index_select.default) == 1
    (refusal,) = result.refusals
    assert "all rows are computed" in refusal.reason
    assert_rows_equal(before, after)


def test_a_head_of_which_the_logits_are_one_of_two_users():
    body = Head(lambda y, x: y + y.detach().relu())
    before, after, result = gathered(body)
    assert result.refusals
    assert_rows_equal(before, after)
