"""Activations in fp8: what codes and scales promise; every provider against the reference, alone and fused."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagebinder.custom_ops.activation.gated_activation import ACTIVATIONS
from pagebinder.custom_ops.fp8.quant import GRANULARITIES, MIN_SCALE, dequantise
from pagebinder.custom_ops.norm.rms_norm import TAILS
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import CompilerNotFoundError

ours = torch.ops.pagebinder
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE_SHAPES = {"tensor": (1,), "token": (2, 3, 1), "group": (2, 3, 3)}


def chosen(name: str):
    """Op name -> its overload, of one provider."""
    provider = registered_providers()[name]
    if isinstance(provider.problem(), CompilerNotFoundError):
        pytest.skip(str(provider.problem()))
    provider.prepare("scaled_fp8_quant")
    return provider.overload


@pytest.fixture(scope="module", params=["reference", "cpu"])
def op(request):
    return chosen(request.param)


def values(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """About 1, with rows and groups of other magnitudes; the third row is zero."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if x.dim() > 1:
        x[..., 0, :] *= 30
        x[..., 2, :] = 0
    x[..., :128] /= 8
    return x.to(dtype)


def same_bits(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous()
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def nearly_same_codes(found, expected) -> None:
    """Sums in another order move a value over the edge between two codes now and then, and no further.

    A NaN is one, whatever its sign: processors differ in it.
    """
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if a.dtype == torch.float32 else 2**-7, atol=1e-6)
    a, b = (codes.view(torch.uint8).short() for codes in (found[0], expected[0]))
    apart = torch.where((a ^ b) & 128 != 0, (a & 127) + (b & 127), (a - b).abs())
    apart = apart.masked_fill((a & b & 127) == 127, 0)
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_come_back(op, granularity, dtype):
    x = values(2, 3, 300, dtype=dtype)
    codes, scale = op("scaled_fp8_quant")(x, granularity=granularity)
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == SCALE_SHAPES[granularity]
    same_bits((codes, scale), ours.scaled_fp8_quant(x, granularity=granularity))
    errors, sizes = (dequantise(codes, scale) - x.float()).abs(), x.float().abs()
    assert (errors <= torch.maximum(sizes * 2**-4, sizes.amax() / 448 * 2**-10) * (1 + 1e-5)).all()


def test_a_static_scale_saturates_and_stays(op):
    x = torch.tensor([[0.0, 1.0, -1.0, 0.2, 900.0, -math.inf, 2.0**-12, math.nan]])
    codes, scale = op("scaled_fp8_quant")(x, torch.tensor([0.5]), granularity="tensor")
    assert scale.tolist() == [0.5]
    expected = torch.tensor([[0.0, 2.0, -2.0, 0.40625, 448.0, -448.0, 0.0, math.nan]])
    torch.testing.assert_close(codes.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_odd_values(op, granularity):
    """Zeros and tiny values have a scale; a NaN spoils what shares its scale, and nothing else."""
    x = values(4, 256)
    x[1] = MIN_SCALE / 4
    x[3, 200] = math.nan
    found = op("scaled_fp8_quant")(x, granularity=granularity)
    same_bits(found, ours.scaled_fp8_quant(x, granularity=granularity))
    spoilt = {"tensor": (slice(None), slice(None)), "token": (3, slice(None)), "group": (3, slice(128, None))}
    expected = torch.zeros(4, 256, dtype=torch.bool)
    expected[spoilt[granularity]] = True
    assert torch.equal(dequantise(*found).isnan(), expected)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_layouts_and_sizes(op, granularity):
    x = values(12, 192, dtype=torch.bfloat16)
    layouts = (x[0], x[::2], x[:, 64:160], x.view(3, 4, 192).transpose(0, 1), x.T, x[:0], x[:1], x[:, :5])
    for rows in layouts:
        found = op("scaled_fp8_quant")(rows, granularity=granularity)
        same_bits(found, ours.scaled_fp8_quant(rows.contiguous(), granularity=granularity))


@pytest.mark.parametrize("granularity", [*GRANULARITIES, "static"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(op, granularity, tail, dtype):
    scale = torch.tensor([0.01]) if granularity == "static" else None
    options = {"eps": 1e-6, "tail": tail, "granularity": "tensor" if scale is not None else granularity}
    x, residual = values(2, 3, 300, dtype=dtype), values(2, 3, 300, seed=1, dtype=dtype)
    weights = (
        [None] if tail == "none" else [1 + values(300, seed=2) / 10, (1 + values(300, seed=2) / 10).to(dtype)]
    )
    for weight in weights:
        found = op("rms_norm_fp8_quant")(x, weight, scale, **options)
        normed = ours.rms_norm(x, weight, eps=1e-6, tail=tail)
        nearly_same_codes(found, ours.scaled_fp8_quant(normed, scale, granularity=options["granularity"]))
        found = op("add_rms_norm_fp8_quant")(x, residual, weight, scale, **options)
        assert torch.equal(found[2], x + residual)
        normed = ours.rms_norm(x + residual, weight, eps=1e-6, tail=tail)
        nearly_same_codes(found[:2], ours.scaled_fp8_quant(normed, scale, granularity=options["granularity"]))


@pytest.mark.parametrize("granularity", [*GRANULARITIES, "static"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(op, granularity, activation):
    scale = torch.tensor([0.01]) if granularity == "static" else None
    granularity = "tensor" if scale is not None else granularity
    for dtype in DTYPES:
        gate, up = values(6, 600, dtype=dtype).chunk(2, dim=-1)  # as a merged projection gives them
        found = op("gated_activation_fp8_quant")(
            gate, up, scale, activation=activation, granularity=granularity
        )
        gated = ours.gated_activation(gate, up, activation=activation)
        nearly_same_codes(found, ours.scaled_fp8_quant(gated, scale, granularity=granularity))


def paged_operands(dtype):
    """Two requests: 5 new tokens after 3, and a decode of the 9th."""
    generator = torch.Generator().manual_seed(0)
    q, cache = (torch.randn(s, generator=generator).to(dtype) for s in ((7, 4, 32), (6, 2, 4, 48)))
    table, lens, starts = (
        torch.tensor(x, dtype=torch.int32) for x in ([[3, 1, 0], [2, 5, 4]], [8, 9], [0, 5, 6])
    )
    return (q, cache, table, lens, starts), {"head_dim_v": 16, "scale": 0.2}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_has_the_bits_of_both_ops(op, granularity, dtype):
    registered_providers()["cpu"].prepare("paged_attention_fp8_quant")
    operands, options = paged_operands(dtype)
    found = op("paged_attention_fp8_quant")(*operands, **options, granularity=granularity)
    rows = op("paged_attention")(*operands, **options).flatten(1)
    same_bits(found, op("scaled_fp8_quant")(rows, granularity=granularity))
    static = torch.tensor([0.01])
    found = op("paged_attention_fp8_quant")(*operands, **options, granularity="tensor", out_scale=static)
    same_bits(found, op("scaled_fp8_quant")(rows, static, granularity="tensor"))


def test_threads_change_nothing():
    op, threads = chosen("cpu"), torch.get_num_threads()
    x, weight = values(200, 512, dtype=torch.bfloat16), torch.ones(512, dtype=torch.bfloat16)
    for granularity in GRANULARITIES:
        found = []
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                quantised = op("rms_norm_fp8_quant")(
                    x, weight, eps=1e-6, tail="cast_scale", granularity=granularity
                )
                found.append(quantised)
        finally:
            torch.set_num_threads(threads)
        same_bits(*found)


def test_bad_operands_raise(op):
    x, both = values(4, 64), (ValueError, RuntimeError)
    with pytest.raises(both, match="row"):
        op("scaled_fp8_quant")(x, granularity="row")
    with pytest.raises(both, match="of the whole tensor"):
        op("scaled_fp8_quant")(x, torch.ones(1), granularity="token")
    with pytest.raises(both, match=r"must be \[1\]"):
        op("scaled_fp8_quant")(x, torch.ones(4), granularity="tensor")
    with pytest.raises(both, match="swish"):
        op("gated_activation_fp8_quant")(x, x, activation="swish", granularity="token")
    with pytest.raises(both, match="tail"):
        op("rms_norm_fp8_quant")(x, x[0], eps=1e-6, tail="tall", granularity="token")


def test_opcheck(op):
    x, options = values(4, 96), {"granularity": "group"}
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(op("scaled_fp8_quant"), (x,), options, test_utils=utils)
    norm = {"eps": 1e-6, "tail": "offset", **options}
    torch.library.opcheck(op("add_rms_norm_fp8_quant"), (x, x, x[0].clone()), norm, test_utils=utils)


def test_the_narrowest_instruction_set():
    if os.uname().machine != "x86_64":
        pytest.skip("x86 only")
    chosen("cpu")
    code = """
from tests.custom_ops import test_fp8_quant as t
op = t.chosen("cpu")
for granularity in t.GRANULARITIES:
    t.test_odd_values(op, granularity)
    for dtype in t.DTYPES:
        t.test_values_come_back(op, granularity, dtype)
        for tail in t.TAILS:
            t.test_norms(op, granularity, tail, dtype)
    for activation in t.ACTIVATIONS:
        t.test_gated_activations(op, granularity, activation)
print("passed")
"""
    environment = {
        **os.environ,
        "PAGEBINDER_CPU_MARCH": "x86-64",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "passed" in result.stdout, result.stderr
