"""The router of a mixture and its experts in one op: structure, bits, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.passes.certificates import certify
from pagebinder.passes.fuse_moe_routing import fuse_moe_routing
from pagebinder.passes.trail import Step
from tests.graphs import assert_metadata_kept, captured, clone, count, run
from tests.helpers import by_day

EXPERTS, WIDTH, INNER = 16, 16, 12
OURS, aten = torch.ops.pagebinder, torch.ops.aten
pytestmark = pytest.mark.skipif(build.problem() is not None, reason="no C++ compiler")


class Mixture(nn.Module):
    """`route(logits [T, E], bias [E]) -> ids, weights` in front of experts; so coarse that many logits are equal."""

    def __init__(self, route, num_logits=EXPERTS, read_twice=False):
        super().__init__()
        self.route, self.router, self.read_twice = route, nn.Linear(WIDTH, num_logits), read_twice
        generator = torch.Generator().manual_seed(1)
        shapes = {"up": (EXPERTS, 2 * INNER, WIDTH), "down": (EXPERTS, WIDTH, INNER), "bias": (num_logits,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.bias.data = self.bias.mul(2).round() / 4

    def forward(self, x, positions):
        x = x[0]
        ids, weights = self.route((self.router(x) * 4).round() / 4, self.bias)
        out = OURS.moe_experts(
            x, ids, weights, self.up, self.down, None, None, transposed=False, **Gate().as_options()
        )
        return (out + weights.sum(-1, keepdim=True) if self.read_twice else out)[None]


def softmax_first(logits, bias):
    """Qwen3-MoE, OLMoE."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(3)
    return ids, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)


def softmax_of_float32(logits, bias):
    """Mixtral, MiniMax."""
    weights, ids = logits.float().softmax(-1).topk(2)
    return ids, weights / weights.sum(-1, keepdim=True)


def softmax_of_the_chosen(logits, bias):
    """GPT-OSS."""
    chosen, ids = logits.topk(4, dim=-1)
    return ids, chosen.softmax(1, dtype=chosen.dtype)


def softmax_of_the_chosen_in_float32(logits, bias):
    """GraniteMoE."""
    chosen, ids = logits.float().topk(4)
    return ids, chosen.softmax(1).type_as(logits)


def softmax_and_a_bias(logits, bias):
    scores = logits.float().softmax(1)
    ids = (scores + bias).topk(5, dim=-1).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True)


def softmax_over_a_least_sum(logits, bias):
    """ERNIE 4.5, whose least sum is 1e-12."""
    scores = logits.softmax(1, dtype=torch.float32)
    ids = (scores + bias).topk(3, dim=-1).indices
    weights = scores.gather(1, ids)
    return ids, (weights / torch.clamp(weights.sum(-1, keepdim=True), min=0.3)).to(logits.dtype)


def sigmoid_in_groups(logits, bias):
    """DeepSeek-V3, GLM-4-MoE."""
    scores = logits.float().sigmoid()
    rated = scores + bias
    groups = rated.view(-1, 4, EXPERTS // 4).topk(2, dim=-1)[0].sum(dim=-1)
    best = groups.topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, EXPERTS // 4).reshape(-1, EXPERTS)
    ids = rated.masked_fill(~mask.bool(), float("-inf")).topk(3, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


def softmax_in_groups(logits, bias):
    """DeepSeek-V2."""
    scores = logits.softmax(-1, dtype=torch.float32)
    groups = scores.view(-1, 4, EXPERTS // 4).max(dim=-1).values
    best = groups.topk(1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, EXPERTS // 4).reshape(-1, EXPERTS)
    weights, ids = scores.masked_fill(~mask.bool(), 0.0).topk(5, dim=-1, sorted=False)
    return ids, weights * 16.0


def scores_of_another_kind(logits, bias):
    """DeepSeek-V4: the op begins behind the scores."""
    scores = nn.functional.softplus(logits.float()).sqrt()
    ids = (scores + bias).topk(2, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5


ROUTERS = {
    softmax_first: "softmax, top 3, weights / sum",
    softmax_of_float32: "softmax, top 2, weights / sum",
    softmax_of_the_chosen: "logits, top 4, softmax of weights",
    softmax_of_the_chosen_in_float32: "logits, top 4, softmax of weights",
    softmax_and_a_bias: "softmax, top 5, weights / sum",
    softmax_over_a_least_sum: "softmax, top 3, weights / sum of at least 0.3",
    sigmoid_in_groups: "sigmoid, top 3, in 2 of 4 groups, weights / sum, times 2.5",
    softmax_in_groups: "softmax, top 5, in 1 of 4 groups, times 16",
    scores_of_another_kind: "logits, top 2, weights / sum, times 1.5",
}


BY_DAY = (
    softmax_first, softmax_of_the_chosen, softmax_and_a_bias, softmax_over_a_least_sum, sigmoid_in_groups,
)  # fmt: skip


@pytest.mark.parametrize("route", by_day(ROUTERS, BY_DAY), ids=lambda route: route.__name__)
def test_a_router_and_its_experts_become_one_op_of_the_same_bits(route):
    before = captured(Mixture(route), width=WIDTH, dtype=torch.bfloat16)
    after = clone(before)
    result = fuse_moe_routing(after)
    assert [m.detail for m in result.matches] == [ROUTERS[route]] and not result.refusals
    assert count(after, OURS.moe_routed_experts.default) == 1
    assert count(after, OURS.moe_experts.default, aten.topk.default, aten.gather.default) == 0
    assert_metadata_kept(after, OURS.moe_routed_experts.default)
    for num_tokens in (1, 40):
        assert torch.equal(run(before, num_tokens), run(after, num_tokens))
    (certificate,) = certify(
        *(Step("decoder", "fused", "fuse_moe_routing", gm, result) for gm in (before, after))
    )
    assert not certificate.reason and certificate.max_abs_error == 0.0


def biased_weights(logits, bias):
    scores = logits.float().sigmoid()
    ids = (scores + bias).topk(3).indices
    return ids, (scores * 2).gather(1, ids)


def smallest(logits, bias):
    weights, ids = logits.float().softmax(-1).topk(3, largest=False)
    return ids, weights


def looked_up(logits, bias):
    ids = torch.zeros_like(logits[:, :3], dtype=torch.int64)
    return ids, logits.float().sigmoid().gather(1, ids)


def clamped_sum(logits, bias):
    weights, ids = logits.float().softmax(-1).topk(3)
    return ids, weights / weights.sum(-1, keepdim=True).clamp(min=1e-3, max=0.5)


def other_sum(logits, bias):
    scores = logits.float().softmax(-1)
    weights, ids = scores.topk(3)
    return ids, weights / scores.sum(-1, keepdim=True)


def weights_of_the_token(logits, bias):
    weights, ids = logits.float().softmax(-1).topk(3)
    return ids, weights * logits[:, :1].float()


def narrow_sums(logits, bias):
    weights, ids = logits.sigmoid().topk(3)
    return ids, weights / weights.sum(-1, keepdim=True)


def other_mask(logits, bias):
    scores = logits.float().softmax(-1)
    weights, ids = scores.masked_fill(~(scores > 0.01), 0.0).topk(3)
    return ids, weights


def worst_groups(logits, bias):
    scores = logits.float().softmax(-1)
    groups = scores.view(-1, 4, EXPERTS // 4).min(dim=-1).values
    mask = torch.zeros_like(groups).scatter_(1, groups.topk(2).indices, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, EXPERTS // 4).reshape(-1, EXPERTS)
    weights, ids = scores.masked_fill(~mask.bool(), 0.0).topk(3)
    return ids, weights


NEAR_MISSES = {
    biased_weights: "not gathered from the scores that choose",
    smallest: "not the best of each row",
    looked_up: "not the best of some scores",
    clamped_sum: "has other bounds than a least positive one",
    other_sum: "aten.sum.dim_IntList, not by their sum",
    weights_of_the_token: "aten.mul.Tensor, which is not understood",
    narrow_sums: "rounded before they are used",
    other_mask: "not that of the best groups",
    worst_groups: "rated by <built-in function getitem>",
}


MISSES_BY_DAY = [route for route in NEAR_MISSES if route is not worst_groups]


@pytest.mark.parametrize("route", by_day(NEAR_MISSES, MISSES_BY_DAY), ids=lambda route: route.__name__)
def test_routers_that_are_not_understood_are_refused(route):
    gm = captured(Mixture(route), width=WIDTH, dtype=torch.bfloat16)
    result = fuse_moe_routing(gm)
    assert not result.matches and not result.changed
    (refusal,) = result.refusals
    assert NEAR_MISSES[route] in refusal.reason and refusal.source_line


def test_what_else_stands_against_it():
    gm = captured(Mixture(softmax_first), width=WIDTH)
    (refusal,) = fuse_moe_routing(gm, requested=("moe_experts",)).refusals
    assert "asked for" in refusal.reason
    gm = captured(Mixture(softmax_first, num_logits=EXPERTS + 2), width=WIDTH)
    (refusal,) = fuse_moe_routing(gm).refusals
    assert "weights of" in refusal.reason


def test_weights_that_are_read_elsewhere_stay():
    before = captured(Mixture(softmax_of_float32, read_twice=True), width=WIDTH)
    after = clone(before)
    assert len(fuse_moe_routing(after).matches) == 1 and count(after, aten.topk.default) == 1
    assert torch.equal(run(before, 9), run(after, 9))
