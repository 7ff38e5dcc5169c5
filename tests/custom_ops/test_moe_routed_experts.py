"""`moe_routed_experts`: choosing and computing in one call has the bits of the two, and chooses as torch does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pagebinder.custom_ops.moe.router import Router
from tests.custom_ops.test_moe_experts import ops_of, random

EXPERTS, WIDTH, INNER = 32, 16, 12
GATE = {
    "transposed": False, "activation": "silu", "gated": True, "interleaved": False, "limit": None, "alpha": None,
    "up_offset": 0.0, "in_float32": False,
}  # fmt: skip
GROUPED = {"num_groups": 8, "top_groups": 3}
ROUTERS = {
    "qwen3-moe": Router(top_k=8, score="softmax", weigh_rated=True, normalised="sum", weight_dtype=torch.bfloat16),
    "gpt-oss": Router(
        top_k=4, score="logits", weigh_rated=True, normalised="softmax", softmax_dtype=torch.bfloat16
    ),
    "deepseek-v2": Router(
        top_k=6, score="softmax", weigh_rated=True, scale=16.0, other_groups_zero=True, sorted_choice=False, **GROUPED
    ),
    "deepseek-v3": Router(
        top_k=8, score="sigmoid", group_score="best_two", normalised="sum", epsilon=1e-20, scale=2.5,
        sorted_choice=False, **GROUPED,
    ),
    "ernie 4.5": Router(top_k=6, score="softmax", normalised="sum", least_sum=0.4),  # of some tokens; theirs: 1e-12
    "ten of them": Router(top_k=10, score="softmax", normalised="sum", epsilon=1e-6, weight_dtype=torch.float16),
    "one": Router(top_k=1, score="sigmoid"),
    "all": Router(top_k=EXPERTS, score="softmax"),
}  # fmt: skip


@pytest.fixture(params=["reference", "cpu"])
def ops(request):
    return ops_of(request.param)


def weights(dtype=torch.float32):
    up = random(EXPERTS, 2 * INNER, WIDTH, seed=1, dtype=dtype) * WIDTH**-0.5
    return up, random(EXPERTS, WIDTH, INNER, seed=2, dtype=dtype) * INNER**-0.5, None, None


def coarse(*shape, steps=4, seed=0):
    """So few different values that each row has equal ones at the border of what is chosen."""
    return (random(*shape, seed=seed) * steps).round() / steps


def call(ops, x, logits, bias, operands, router):
    return ops.moe_routed_experts(x, logits, bias, *operands, **router.as_options(), **GATE)


@pytest.mark.parametrize("name", ROUTERS)
def test_bits_are_those_of_choosing_first(ops, name):
    router, operands = ROUTERS[name], weights(torch.bfloat16)
    for num_tokens, dtype, bias in (
        (1, torch.bfloat16, None),
        (70, torch.float32, coarse(EXPERTS, seed=3) / 8),
    ):
        x, logits = random(num_tokens, WIDTH, dtype=torch.bfloat16), coarse(num_tokens, EXPERTS).to(dtype)
        ids, chosen = router(logits, bias)
        expected = ops.moe_experts(x, ids, chosen, *operands, **GATE)
        assert expected.float().abs().mean() > 0.05
        assert torch.equal(call(ops, x, logits, bias, operands, router), expected)


@pytest.mark.parametrize("num_experts", [1, 4, 60, 128, 512])
def test_equal_scores_are_chosen_as_torch_chooses_them(num_experts):
    """Among 512, 8 and fewer are selected by another algorithm. NaN and infinities come where torch puts them."""
    cpu = ops_of("cpu")
    # Expert e gives sqrt(e + 1), so that the sum tells which ones were chosen.
    up = torch.ones(num_experts, 1, 1)
    down = (1 + torch.arange(num_experts)).float().view(-1, 1, 1).sqrt().expand(-1, 1, 1).contiguous()
    options = {**GATE, "gated": False, "activation": "relu"}
    x = torch.ones(24, 1)
    for top_k in {1, min(8, num_experts), min(10, num_experts), num_experts}:
        for sorted_choice in (True, False):
            router = Router(top_k=top_k, score="logits", sorted_choice=sorted_choice)
            logits = coarse(24, num_experts, steps=2, seed=top_k)
            logits[:, :: max(2, num_experts // 3)] = 7.0
            logits[3:5, num_experts // 2] = float("inf")
            ids, chosen = router(logits, None)
            expected = cpu.moe_experts(x, ids, chosen, up, down, None, None, **options)
            got = cpu.moe_routed_experts(
                x, logits, None, up, down, None, None, **router.as_options(), **options
            )
            assert torch.equal(got, expected)


def test_bits_depend_on_neither_threads_nor_other_tokens():
    cpu, router, operands = ops_of("cpu"), ROUTERS["deepseek-v3"], weights()
    x, logits, bias = random(700, WIDTH), coarse(700, EXPERTS), coarse(EXPERTS, seed=3)
    whole, threads = call(cpu, x, logits, bias, operands, router), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(call(cpu, x, logits, bias, operands, router), whole)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(call(cpu, x[5:9], logits[5:9], bias, operands, router), whole[5:9])


def test_no_tokens_and_strides(ops):
    router, operands = ROUTERS["qwen3-moe"], weights()
    assert call(ops, random(0, WIDTH), coarse(0, EXPERTS), None, operands, router).shape == (0, WIDTH)
    x, wide = random(9, WIDTH), coarse(9, 2 * EXPERTS)
    expected = call(ops, x, wide[:, ::2].contiguous(), None, operands, router)
    assert torch.equal(call(ops, x, wide[:, ::2], None, operands, router), expected)


@pytest.mark.parametrize(
    ("logits", "bias", "changes", "reason"),
    [
        (coarse(3, EXPERTS), None, {}, "takes logits"),
        (coarse(4, EXPERTS + 1), None, {}, "takes logits"),
        (coarse(4, EXPERTS), coarse(EXPERTS - 1), {}, "one value an expert"),
        (coarse(4, EXPERTS), None, {"top_k": EXPERTS + 1}, "do not give"),
        (coarse(4, EXPERTS), None, {"num_groups": 5}, "do not give"),
    ],
)
def test_operands_that_do_not_fit_are_errors(ops, logits, bias, changes, reason):
    router = dataclasses.replace(ROUTERS["one"], **changes)
    with pytest.raises((ValueError, RuntimeError), match=reason):
        call(ops, random(4, WIDTH), logits, bias, weights(), router)


def test_routers_that_make_no_sense_are_errors():
    for options in ({"score": "tanh"}, {"normalised": "max"}, {"group_score": "worst"}):
        with pytest.raises(ValueError, match="use one of"):
            Router(**{"top_k": 2, "score": "softmax", **options})
    with pytest.raises(ValueError, match="makes no sense"):
        Router(top_k=2, score="softmax", num_groups=2, top_groups=3)


def test_opcheck():
    operands, options = (
        (random(4, WIDTH), coarse(4, EXPERTS), coarse(EXPERTS), *weights()),
        ROUTERS["gpt-oss"],
    )
    op = ops_of("cpu").moe_routed_experts.default
    torch.library.opcheck(op, operands, {**options.as_options(), **GATE})
