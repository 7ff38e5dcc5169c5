"""Mixtures of experts in Triton: the cases of the other providers, against float64, in tiles of each kind."""

from types import SimpleNamespace

import pytest
import torch

from tests.custom_ops.test_moe_experts import (  # noqa: F401  (run here with the provider of this folder)
    DTYPES,
    GATES,
    NUM_EXPERTS,
    WIDTH,
    oracle,
    random,
    routing,
    run,
    test_a_token_gets_the_same_whoever_shares_the_batch,
    test_an_id_outside_the_experts_adds_nothing,
    test_no_tokens,
    test_one_expert_chosen_twice_is_added_twice,
    test_other_tokens_never_enter_a_row,
    weights,
)
from tests.custom_ops.triton.on_device import DEVICE

OPS = ("moe_experts", "expert_linear")


@pytest.fixture(scope="module")
def ops(provider):
    return SimpleNamespace(**{op: provider.overload(op) for op in OPS})


def check(ops, name, transposed, bias, dtype, sizes, width=WIDTH, inner=12):
    """Products, gate and sum are float32; what the gate makes is rounded once, so are rows, and so is their sum."""
    gate = GATES[name]
    operands = weights(gate, transposed=transposed, bias=bias, dtype=dtype, width=width, inner=inner)
    for num_tokens, num_slots in sizes:
        x = random(num_tokens, width, dtype=dtype)
        ids, chosen = routing(num_tokens, num_slots)
        expected = oracle(x, ids, chosen, operands, gate, transposed)
        got = run(ops, x, ids, chosen, operands, gate, transposed)
        assert got.dtype is dtype and got.shape == x.shape and got.is_contiguous()
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), expected, rtol=max(unit, 1e-5), atol=max(4 * unit, 1e-5))


@pytest.mark.parametrize(("name", "dtype"), [*zip(GATES, DTYPES * 2)])
def test_gates(ops, name, dtype):
    transposed = dtype is torch.bfloat16
    check(ops, name, transposed, not transposed, dtype, [(1, 1), (5, 3)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(ops, dtype):
    """Tiles of 16, 64 and 128 rows, full, partly empty and several of an expert; widths that blocks do not divide."""
    sizes = [(3, 2), (50, 2), (200, 2)] if dtype is torch.bfloat16 else [(7, 2)]
    check(ops, "silu", False, False, dtype, sizes, width=72, inner=45)
    check(ops, "gpt-oss", True, True, dtype, [(3, 4)], width=140, inner=64)


@pytest.mark.parametrize("transposed", [False, True])
def test_expert_linear(ops, transposed):
    for dtype in DTYPES:
        up, _, up_bias, _ = weights(transposed=transposed, bias=True, dtype=dtype)
        x, (ids, _) = random(7, WIDTH, dtype=dtype), routing(7, 3)
        ids[2, 1] = NUM_EXPERTS
        wide = (up.float(), up_bias.float())
        expected = torch.ops.pagebinder.expert_linear(x.float(), ids, *wide, transposed=transposed)
        for rows in (x, x[:, None].expand(-1, 3, -1)):
            got = ops.expert_linear(rows, ids, up, up_bias, transposed=transposed)
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(got.float(), expected, rtol=max(unit, 1e-5), atol=2e-5)


@pytest.mark.parametrize("outside", [-1, NUM_EXPERTS])
def test_whole_tiles_of_slots_without_an_expert(ops, outside):
    """Sorted to the ends, they fill tiles of their own, which no expert takes."""
    up, *_ = weights()
    x, ids = random(40, WIDTH), torch.full((40, 2), outside)
    ids[3, 1] = 2
    expected = torch.ops.pagebinder.expert_linear(x, ids, up, None, transposed=False)
    got = ops.expert_linear(x, ids, up, None, transposed=False)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
    assert not got.flatten(0, 1)[ids.flatten() == outside].any()


def test_layouts(ops):
    """Views are read where they lie: transposed weights, slices, rows that are apart."""
    up, down, *_ = weights()
    x, (ids, chosen) = random(7, WIDTH), routing(7, 2)
    expected = run(ops, x, ids, chosen, (up, down, None, None))
    views = [(up.mT.contiguous().mT, down.mT.contiguous().mT)]
    views.append((torch.cat([up, up], 2)[..., :WIDTH], torch.cat([down, down], 1)[:, :WIDTH]))
    for view in views:
        assert torch.equal(run(ops, x, ids, chosen, (*view, None, None)), expected)
    wide = random(7, 2 * WIDTH)
    wide[:, :WIDTH] = x
    assert torch.equal(
        run(ops, wide[:, :WIDTH], ids.T.contiguous().T, chosen, (up, down, None, None)), expected
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, ids, chosen: (x, ids[:3], chosen), "expert ids and weights"),
        (lambda x, ids, chosen: (x.double(), ids, chosen), "cast x first"),
        (lambda x, ids, chosen: (x[:, :9], ids, chosen), "do not fit each other"),
    ],
)
def test_operands_that_do_not_fit_are_errors(ops, change, reason):
    with pytest.raises(ValueError, match=reason):
        run(ops, *change(random(4, WIDTH), *routing(4, 2)), weights())


@pytest.mark.parametrize("op", OPS)
def test_opcheck(provider, op):
    provider.overload(op)
    up, down, *biases = (w.to(DEVICE) for w in weights(bias=True))
    x, (ids, chosen) = random(4, WIDTH).to(DEVICE), (r.to(DEVICE) for r in routing(4, 2))
    if op == "moe_experts":
        operands, options = (x, ids, chosen, up, down, *biases), GATES["silu"].as_options()
    else:
        operands, options = (x, ids, up, biases[0]), {}
    overload = getattr(torch.ops.pagebinder_triton, op)
    options, utils = {"transposed": False, **options}, ("test_schema", "test_faketensor")
    torch.library.opcheck(overload, operands, options, test_utils=utils)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
def test_a_captured_call_serves_another_routing(provider):
    provider.overload("moe_experts")
    operands = [None if w is None else w.to(DEVICE) for w in weights(dtype=torch.bfloat16)]
    x, (ids, chosen) = (
        random(40, WIDTH, dtype=torch.bfloat16).to(DEVICE),
        (r.to(DEVICE) for r in routing(40, 2)),
    )
    experts = torch.ops.pagebinder_triton
    run(experts, x, ids, chosen, operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(experts, x, ids, chosen, operands)
    ids.fill_(3)
    graph.replay()
    assert torch.equal(out, run(experts, x, ids, chosen, operands))
