"""Mixtures whose experts have weights of 8 or 4 bits in Triton: cases of the other providers, against float64."""

from types import SimpleNamespace

import pytest
import torch

from pagebinder.custom_ops.linear.weight_formats import FORMATS, weight_format
from tests.custom_ops.test_moe_experts import GATES, NUM_EXPERTS, oracle, random, routing
from tests.custom_ops.test_quantized_moe_experts import (  # noqa: F401  (run here with the provider of this folder)
    FEW_FORMATS,
    OF_CHECKPOINTS,
    WIDTH,
    oracle_of,
    run,
    stacks,
    test_no_tokens_and_no_experts,
    test_only_chosen_experts_are_read,
    test_other_tokens_never_enter_a_row,
    values,
)
from tests.custom_ops.triton.on_device import DEVICE
from tests.helpers import by_day


@pytest.fixture(scope="module")
def ops(provider):
    return SimpleNamespace(quantized_moe_experts=provider.overload("quantized_moe_experts"))


def check(ops, kind, name, dtype, sizes, **options):
    """Products and the gate are float32; what the gate makes is rounded once, so are rows, and so is their sum."""
    gate = GATES[kind]
    operands = stacks(name, gate, dtype=dtype, **options)
    wide = [None if w is None else w.float() for w in values(operands, name)]
    for num_tokens, num_slots in sizes:
        x = random(num_tokens, operands[0].shape[2] * 32, dtype=dtype)
        ids, chosen = routing(num_tokens, num_slots)
        expected = oracle(x, ids, chosen, wide, gate, False)
        got = run(ops, x, ids, chosen, operands, name, gate)
        assert got.dtype is dtype and got.shape == x.shape and got.is_contiguous()
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), expected, rtol=max(2 * unit, 1e-5), atol=max(8 * unit, 2e-5))


@pytest.mark.parametrize("kind", GATES)
def test_gates(ops, kind):
    for name, dtype in (("int8", torch.bfloat16), ("int4_g32", torch.float32)):
        check(ops, kind, name, dtype, [(1, 1), (5, 3)], bias=True)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(ops, name):
    """k that tiles do not divide, and panels: 192 = 6 steps, 320 columns are 10 panels."""
    for dtype in (torch.bfloat16, torch.float16):
        check(ops, "silu", name, dtype, [(3, 2)], width=192, inner=320)


@pytest.mark.parametrize("name", ["int4_g64/int8", "int8_g32/mxfp4"])
def test_each_projection_in_its_format(ops, name):
    check(ops, "silu", name, torch.bfloat16, [(3, 2)])


READ = [name for name in OF_CHECKPOINTS if weight_format(name).gpu_problem is None]


@pytest.mark.parametrize("name", by_day(READ, ("uint4_g64",)))
def test_codes_of_checkpoints(ops, name):
    check(ops, "silu", name, torch.bfloat16, [(3, 2), (50, 2)], width=256, inner=128, bias=True)


@pytest.mark.parametrize("kind", ["silu", "gpt-oss", "not gated"])
@pytest.mark.parametrize("name", by_day(FEW_FORMATS, ("int4_g64",)))
def test_tiles_of_each_kind(ops, kind, name):
    """Of 16, 64 and 128 rows, full, partly empty and several of an expert."""
    check(ops, kind, name, torch.bfloat16, [(3, 2), (50, 2), (260, 2)], bias=True)


def test_ragged_routings(ops):
    """All rows to one expert, one row to another, none to the rest; ids of no expert."""
    operands, x = stacks("fp8_block"), random(17, WIDTH)
    ids, chosen = torch.full((17, 2), 2), random(17, 2, seed=7).softmax(1)
    ids[:, 1], ids[8, 1], ids[3, 0] = -1, 5, NUM_EXPERTS
    expected = oracle_of(
        x, ids.where(ids < NUM_EXPERTS, -1), chosen, values(operands, "fp8_block"), GATES["silu"], False
    )
    got = run(ops, x, ids, chosen, operands, "fp8_block").double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_operands_that_do_not_fit_are_errors(ops):
    operands, x, (ids, chosen) = stacks("int8"), random(4, WIDTH), routing(4, 2)
    for message, given, name in (
        ("with scales", (x, ids, chosen, operands), "int4_g64"),
        ("with scales", (x, ids, chosen, [operands[0], operands[1][:2], *operands[2:]]), "int8"),
        ("do not fit each other", (x[:, :64], ids, chosen, operands), "int8"),
        ("expert ids and weights", (x, ids[:3], chosen, operands), "int8"),
        ("bias must be", (x, ids, chosen, [*operands[:4], torch.zeros(2, 3), None]), "int8"),
        ("no format of weights", (x, ids, chosen, operands), "int7"),
    ):
        with pytest.raises(ValueError, match=message):
            run(ops, *given, name)


def test_opcheck(provider):
    provider.overload("quantized_moe_experts")
    operands = [w.to(DEVICE) for w in stacks("int8", GATES["gpt-oss"], bias=True)]
    x, (ids, chosen) = random(4, WIDTH).to(DEVICE), (r.to(DEVICE) for r in routing(4, 2))
    overload = torch.ops.pagebinder_triton.quantized_moe_experts
    options = {"format": "int8", **GATES["gpt-oss"].as_options()}
    torch.library.opcheck(
        overload, (x, ids, chosen, *operands), options, test_utils=("test_schema", "test_faketensor")
    )
