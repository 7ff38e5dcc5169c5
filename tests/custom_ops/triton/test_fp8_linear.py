"""Products of fp8 activations and weights in Triton, and when the library's own product takes their place."""

import pytest
import torch

from pagebinder.custom_ops.fp8.linear import FORMATS
from pagebinder.custom_ops.fp8.quant import GRANULARITIES
from pagebinder.custom_ops.linear.code_order import unpack_8
from pagebinder.custom_ops.triton import gpu
from tests.custom_ops.test_fp8_linear import (  # noqa: F401  (run here with the provider of this folder)
    exact,
    operands,
    test_bad_operands_raise,
    test_layouts,
    test_subnormal_codes_and_nan_count,
)
from tests.custom_ops.triton.on_device import DEVICE
from tests.helpers import by_day
from tests.tolerances import assert_close

# Tiles of each kind, full and not: rows, columns (panels of 32), k (steps of 32).
SIZES = {"fp8": (5, 64, 448), "fp8_tensor": (20, 96, 64), "fp8_block": (3, 160, 320)}
ADA, HOPPER, AMPERE = (8, 9), (9, 0), (8, 6)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def linear(provider):
    return provider.overload("fp8_linear")


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", FORMATS)
def test_against_float64(linear, granularity, format):
    rows, columns, inner = SIZES[format]
    given = operands(rows, columns=columns, inner=inner, granularity=granularity, format=format)
    bias = torch.linspace(-1, 1, columns)
    for dtype, added in ((F32, None), (BF16, bias.bfloat16()), (F16, bias)):
        y = linear(*given, added, format=format, dtype=dtype)
        assert y.dtype == dtype and y.is_contiguous()
        assert_close(y, exact(*given, added, format))


@pytest.mark.parametrize(
    ("granularity", "format"),
    by_day(
        [("tensor", "fp8_tensor"), ("token", "fp8"), ("group", "fp8_block"), ("group", "fp8")],
        [("token", "fp8")],
    ),
)
def test_parts_of_k(linear, granularity, format, monkeypatch):
    """Scales and bias belong to the sum of all parts, or to what a part adds up."""
    monkeypatch.setattr(gpu, "MULTIPROCESSORS_OF_NO_GPU", 8)
    given = operands(3, columns=64, inner=1600, granularity=granularity, format=format)
    bias = torch.linspace(-1, 1, 64)
    assert_close(linear(*given, bias, format=format, dtype=BF16), exact(*given, bias, format))


def test_the_largest_tile(linear):
    given = operands(70, columns=160, inner=320, granularity="group", format="fp8_block")
    assert_close(linear(*given, format="fp8_block", dtype=F32), exact(*given, None, "fp8_block"))


@pytest.mark.parametrize(
    ("rows", "x_shares", "format", "dtype", "bias", "gpu", "scales"),
    [
        (512, "tensor", "fp8_tensor", BF16, BF16, ADA, "tensor"),
        (512, "tensor", "fp8_tensor", F16, F16, HOPPER, "tensor"),
        (511, "tensor", "fp8_tensor", BF16, BF16, HOPPER, None),
        (512, "tensor", "fp8_tensor", BF16, BF16, AMPERE, None),
        (512, "tensor", "fp8_tensor", F32, F32, HOPPER, None),
        (512, "tensor", "fp8_tensor", BF16, F32, HOPPER, None),
        (512, "token", "fp8", BF16, BF16, HOPPER, "rows"),
        (512, "tensor", "fp8", BF16, BF16, HOPPER, "rows"),
        (512, "token", "fp8_tensor", BF16, BF16, HOPPER, "rows"),
        (512, "token", "fp8", BF16, BF16, ADA, None),
        (512, "token", "fp8", F16, F16, HOPPER, None),
        (512, "group", "fp8", BF16, BF16, HOPPER, None),
        (512, "token", "fp8_block", BF16, BF16, HOPPER, None),
    ],
)
@pytest.mark.usefixtures("provider")
def test_the_choice_of_the_library(rows, x_shares, format, dtype, bias, gpu, scales):
    from pagebinder.custom_ops.triton.quantized_linear import library_scales

    assert library_scales(rows, x_shares, format, dtype, bias, gpu) == scales


@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize(
    ("granularity", "format", "scales"),
    [
        ("tensor", "fp8_tensor", "tensor"),
        ("token", "fp8", "rows"),
        ("tensor", "fp8", "rows"),
        ("token", "fp8_tensor", "rows"),
    ],
)
def test_what_the_library_is_given(monkeypatch, granularity, format, scales):
    """A stand-in for it demands the layouts that it does: codes by rows and by columns, scales [M, 1] and [1, N]."""
    from pagebinder.custom_ops.triton.quantized_linear import by_library

    def product(codes, weight, x_scale, scale, bias, *, out_dtype, use_fast_accum):
        assert codes.is_contiguous() and weight.t().is_contiguous() and not use_fast_accum
        shapes = [(1,), (1,)] if scales == "tensor" else [(6, 1), (1, 96)]
        assert [tuple(s.shape) for s in (x_scale, scale)] == shapes
        assert x_scale.is_contiguous() and scale.is_contiguous()
        return ((codes.float() * x_scale) @ (weight.float() * scale) + bias.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    codes, x_scale, *weight = operands(6, columns=96, inner=448, granularity=granularity, format=format)
    bias = torch.linspace(-1, 1, 96).bfloat16()
    on_device = [t.to(DEVICE) for t in (codes.view(torch.uint8), x_scale, *weight, bias)]
    y = by_library(*on_device, BF16, scales).cpu()
    assert_close(y, exact(codes, x_scale, *weight, bias, format))


@pytest.mark.usefixtures("provider")
def test_codes_in_rows():
    from pagebinder.custom_ops.triton.quantized_linear import unpacked

    packed = torch.randint(0, 256, (3, 5, 2, 512), dtype=torch.uint8)
    assert torch.equal(unpacked(packed.to(DEVICE)).cpu(), unpack_8(packed))


def test_opcheck(provider):
    given = [t.to(DEVICE) for t in operands(4, columns=64, inner=96, granularity="token", format="fp8")]
    provider.overload("fp8_linear")
    overload, options = torch.ops.pagebinder_triton.fp8_linear, {"format": "fp8", "dtype": BF16}
    torch.library.opcheck(overload, given, options, test_utils="test_faketensor")
