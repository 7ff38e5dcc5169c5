"""The audit and routing: choosing experts for each token is accepted, choosing tokens for experts is not."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.nn import functional as F

from pagebinder.frontend.audit import audit
from pagebinder.graph_tools import calls
from tests.frontend.test_audit import semantic_of, weighted
from tests.graphs import WIDTH, captured

OPS = torch.ops.pagebinder
NUM_EXPERTS = 4


def flat(function):
    """A function of x [T, C] and a weight [E, C, C], as the body of a model."""
    return weighted(lambda x, p, w: function(x[0], w)[None], (NUM_EXPERTS, WIDTH, WIDTH))


def scores(x):
    return x[:, :NUM_EXPERTS].softmax(-1)


def chosen(x):
    return scores(x).topk(2, dim=-1)


def groups(x, w):
    """Group-limited routing as DeepSeek-V3 has it: the best groups, then the best experts in them."""
    s = x.sigmoid()
    best = s.view(-1, 4, WIDTH // 4).topk(2, dim=-1)[0].sum(-1).topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros(s.shape[0], 4).scatter(1, best, 1.0)
    mask = mask.unsqueeze(-1).expand(-1, 4, WIDTH // 4).reshape(-1, WIDTH)
    ids = s.masked_fill(~mask.bool(), float("-inf")).topk(3, dim=-1, sorted=False)[1]
    picked = s.gather(1, ids)
    return x * (picked / (picked.sum(-1, keepdim=True) + 1e-20)).sum(-1, keepdim=True)


def mixture(x, w):
    values, ids = chosen(x)
    h = OPS.expert_linear(x, ids, w, None, transposed=False).relu()
    h = h.reshape(-1, WIDTH).reshape(h.shape)
    return (OPS.expert_linear(h, ids, w, None, transposed=False) * values.unsqueeze(-1)).sum(1)


KEEPS_TOKENS_APART = {
    "grouped routing": groups,
    "one hot": lambda x, w: x + F.one_hot(chosen(x)[1], NUM_EXPERTS).sum(1).float() @ w[0, :NUM_EXPERTS],
    "scatter of weights": lambda x, w: x.scatter(1, chosen(x)[1], chosen(x)[0]),
    "scatter_add": lambda x, w: x.scatter_add(-1, chosen(x)[1], chosen(x)[0]),
    "sort of scores": lambda x, w: x + scores(x).sort(-1, descending=True)[0].cumsum(-1)[:, 1:2],
    "table by id": lambda x, w: x + w[0, :, 0].gather(0, chosen(x)[1][:, 0])[:, None],
    "experts": mixture,
}
MIXES_TOKENS = {
    "experts choose tokens": (lambda x, w: x * scores(x).mT.softmax(-1).mT.sum(-1, True), "token dimension"),
    "top tokens of an expert": (
        lambda x, w: x + scores(x).topk(2, dim=0)[0].sum(),
        "reduces over the tokens",
    ),
    "scatter along tokens": (
        lambda x, w: x.scatter(0, chosen(x)[1][:, :1].expand(-1, WIDTH) * 0, 1.0),
        "token dimension",
    ),
    "scatter of tokens": (lambda x, w: x.scatter_add(0, chosen(x)[1], chosen(x)[0]), "token dimension"),
    "gather of tokens": (lambda x, w: x.gather(0, chosen(x)[1][:, :1].expand(-1, WIDTH)), "token dimension"),
    "capacity": (
        lambda x, w: x * (F.one_hot(chosen(x)[1][:, 0], NUM_EXPERTS).cumsum(0) < 3).sum(-1, True),
        "token dimension",
    ),
    "load of an expert": (lambda x, w: x * scores(x).mean(0).sum(), "reduces over the tokens"),
    "weights of experts from tokens": (
        lambda x, w: OPS.expert_linear(x, chosen(x)[1], w + x.mean(), None, transposed=False).sum(1),
        "reduces over the tokens",
    ),
}


@pytest.mark.parametrize("name", KEEPS_TOKENS_APART)
def test_choosing_experts_is_accepted(name):
    assert audit(semantic_of(flat(KEEPS_TOKENS_APART[name]))) == []


@pytest.mark.parametrize("name", MIXES_TOKENS)
def test_choosing_tokens_is_found(name):
    function, reason = MIXES_TOKENS[name]
    violations = audit(semantic_of(flat(function)))
    assert any(reason in v.reason for v in violations), violations


def hand_written(make):
    """The violations of one node that torch.export would not trace; make(graph, x [T, C], ids [T, 2]) adds it."""
    gm = captured(flat(lambda x, w: x + chosen(x)[1].sum(-1, True)))
    x = next(calls(gm.graph, torch.ops.aten.select.int))
    ids = next(n for n in calls(gm.graph, operator.getitem) if n.args[1] == 1)
    assert x.meta["val"].shape[1:] == (WIDTH,) and ids.meta["val"].shape[1:] == (2,)
    with gm.graph.inserting_after(ids):
        made = make(gm.graph, x, ids)
    made.meta = {**x.meta}
    return [v.reason for v in audit(gm) if v.node == made.name]


def test_rows_of_other_tokens_are_found():
    """ids of [2, T] beside x of [T, C]; and experts' operands whose tokens are not outermost."""
    transposed = torch.ops.aten.t.default

    def gather(graph, x, ids):
        other = graph.call_function(transposed, (ids,))
        other.meta = {**ids.meta, "val": ids.meta["val"].t()}
        return graph.call_function(torch.ops.aten.gather.default, (x, -1, other))

    def experts(graph, x, ids):
        other = graph.call_function(transposed, (ids,))
        other.meta = {**ids.meta, "val": ids.meta["val"].t()}
        args = (x, other, x, None)
        return graph.call_function(OPS.expert_linear.default, args, {"transposed": False})

    def classes(graph, x, ids):
        return graph.call_function(torch.ops.aten.one_hot.default, (ids,))

    def operands(graph, x, ids):
        return graph.call_function(OPS.expert_linear.default, (x, ids, x, None), {"transposed": False})

    assert hand_written(gather) == ["it works along the token dimension"]
    assert hand_written(experts) == ["experts take [tokens, ...] of every operand"]
    assert hand_written(classes) == ["it counts classes by the largest id of the batch"]
    assert hand_written(operands) == ["the weights of experts depend on tokens"]
