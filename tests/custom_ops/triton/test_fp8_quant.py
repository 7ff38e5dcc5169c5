"""Activations in fp8, in Triton: the cases of the other providers, alone and fused with what makes them."""

import itertools

import pytest
import torch

from pagebinder.custom_ops.activation.gated_activation import ACTIVATIONS
from pagebinder.custom_ops.fp8.quant import GRANULARITIES
from pagebinder.custom_ops.norm.rms_norm import TAILS
from tests.custom_ops import test_fp8_quant as cases
from tests.custom_ops.test_fp8_quant import (  # noqa: F401  (run here with the provider of this folder)
    DTYPES,
    paged_operands,
    same_bits,
    test_a_static_scale_saturates_and_stays,
    test_bad_operands_raise,
    test_layouts_and_sizes,
    test_odd_values,
    test_values_come_back,
    values,
)
from tests.custom_ops.triton.on_device import DEVICE

SHARES = (*GRANULARITIES, "static")


@pytest.fixture(scope="module")
def op(provider):
    return provider.overload


@pytest.mark.parametrize("granularity", SHARES)
def test_norms(op, granularity):
    for tail, dtype in zip(TAILS, itertools.cycle(DTYPES[SHARES.index(granularity) % 3 :] + DTYPES)):
        cases.test_norms(op, granularity, tail, dtype)


@pytest.mark.parametrize(
    ("granularity", "activation"), [*zip(itertools.cycle(SHARES), ACTIVATIONS), ("token", "silu")]
)
def test_gated_activations(op, granularity, activation):
    cases.test_gated_activations(op, granularity, activation)


@pytest.mark.parametrize(
    ("granularity", "dtype"), zip(SHARES, (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16))
)
def test_attention_has_the_bits_of_both_ops(op, granularity, dtype):
    static = torch.tensor([0.01]) if granularity == "static" else None
    shares = {"granularity": "tensor" if static is not None else granularity}
    (q, cache, *step), options = paged_operands(dtype)
    codes = torch.randint(0, 100, (*cache.shape[:3], 48), dtype=torch.uint8)
    fixed = (None, None, torch.full((2, 2), 0.01))  # no sinks, no ALiBi, scales
    for name, operands, more in (
        ("paged_attention", (q, cache, *step), {}),
        ("quantized_paged_attention", (q, codes, *step, *fixed), {"codes": "fp8_e4m3"}),
    ):
        found = op(f"{name}_fp8_quant")(*operands, **options, **more, **shares, out_scale=static)
        rows = op(name)(*operands, **options, **more).flatten(1)
        same_bits(found, op("scaled_fp8_quant")(rows, static, **shares))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rows_wider_than_a_tile(op, granularity):
    """Groups and tensors are quantised in column tiles; a group may lie across the end of the row."""
    x = values(3, 2 * 2048 + 200, dtype=torch.bfloat16)
    x[1, 4200] = torch.inf
    found = op("scaled_fp8_quant")(x, granularity=granularity)
    same_bits(found, torch.ops.pagebinder.scaled_fp8_quant(x, granularity=granularity))


def test_no_values(op):
    x, norm = torch.ones(0, 40), {"eps": 1e-6, "tail": "none"}
    for granularity in GRANULARITIES:
        expected = torch.ops.pagebinder.scaled_fp8_quant(x, granularity=granularity)
        same_bits(op("scaled_fp8_quant")(x, granularity=granularity), expected)
        same_bits(op("rms_norm_fp8_quant")(x, granularity=granularity, **norm), expected)
        found = op("gated_activation_fp8_quant")(x, x, activation="silu", granularity=granularity)
        same_bits(found, expected)
    static = torch.tensor([0.5])
    assert op("scaled_fp8_quant")(x, static, granularity="tensor")[1].tolist() == [0.5]


def test_opcheck(provider):
    x, utils = torch.randn(4, 96, device=DEVICE), ("test_schema", "test_faketensor")
    for name, operands, options in (
        (
            "add_rms_norm_fp8_quant",
            (x, x, x[0].clone()),
            {"eps": 1e-6, "tail": "offset", "granularity": "group"},
        ),
    ):
        provider.overload(name)
        overload = getattr(torch.ops.pagebinder_triton, name)
        torch.library.opcheck(overload, operands, options, test_utils=utils)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
def test_a_captured_call_serves_other_values(provider):
    """The largest magnitude of a tensor is collected anew each time."""
    provider.overload("scaled_fp8_quant")
    quantise, x = torch.ops.pagebinder_triton.scaled_fp8_quant, torch.randn(64, 512, device=DEVICE)
    quantise(x, granularity="tensor")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = quantise(x, granularity="tensor")
    x /= 3
    graph.replay()
    same_bits([t.cpu() for t in found], [t.cpu() for t in quantise(x, granularity="tensor")])
