"""Linear layers of activations and weights in fp8: every provider against float64."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.fp8.linear import FORMATS
from pagebinder.custom_ops.fp8.quant import GRANULARITIES, dequantise
from pagebinder.custom_ops.linear.weight_numbers import dequantize, quantize
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.tolerances import assert_close

quantise = torch.ops.pagebinder.scaled_fp8_quant


def overload(name: str):
    chosen = registered_providers()[name]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    chosen.prepare("fp8_linear")
    return chosen.overload("fp8_linear")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def linear(request):
    return overload(request.param)


def operands(*rows: int, columns: int, inner: int, granularity: str, format: str):
    """Results are about 1; rows of x and groups in them are of several magnitudes."""
    generator = torch.Generator().manual_seed(rows[0])
    x, weight = (torch.randn(s, generator=generator) for s in ((*rows, inner), (columns, inner)))
    x[..., 0, :] *= 5
    x[..., 32:160] /= 16
    qweight, scale = quantize(weight * inner**-0.5, format)
    return *quantise(x, granularity=granularity), qweight, scale


def exact(codes, x_scale, qweight, scale, bias, format):
    weight, bias = dequantize(qweight, scale, format).double(), None if bias is None else bias.double()
    return torch.nn.functional.linear(dequantise(codes, x_scale).double(), weight, bias)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("rows", "columns", "inner"),
    [(1, 64, 64), (5, 160, 448), (20, 96, 1088), (40, 320, 640), (301, 64, 2112)],
)
def test_against_float64(linear, granularity, format, rows, columns, inner):
    given = operands(rows, columns=columns, inner=inner, granularity=granularity, format=format)
    bias = torch.linspace(-1, 1, columns)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for added in (None, bias.to(dtype)):
            y = linear(*given, added, format=format, dtype=dtype)
            assert y.dtype == dtype and y.is_contiguous()
            assert_close(y, exact(*given, added, format))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_layouts(linear, granularity):
    codes, x_scale, *weight = operands(3, 4, columns=64, inner=160, granularity=granularity, format="fp8")
    y = linear(codes, x_scale, *weight, format="fp8", dtype=torch.float32)
    assert y.shape == (3, 4, 64)
    assert_close(y, exact(codes, x_scale, *weight, None, "fp8"))
    strided = codes.repeat_interleave(2, dim=-1)[..., ::2]
    assert torch.equal(linear(strided, x_scale, *weight, format="fp8", dtype=torch.float32), y)
    x_scale = x_scale if granularity == "tensor" else x_scale[:0]
    assert linear(codes[:0], x_scale, *weight, format="fp8", dtype=torch.bfloat16).shape == (0, 4, 64)


def test_subnormal_codes_and_nan_count(linear):
    _, _, qweight, scale = operands(1, columns=32, inner=32, granularity="token", format="fp8")
    x = torch.full((3, 32), 2.0**-9)
    x[1] = 0
    x[2, 7] = torch.nan
    codes = x.to(torch.float8_e4m3fn)
    y = linear(codes, torch.ones(1), qweight, scale, format="fp8", dtype=torch.float32)
    assert_close(y[:2], exact(codes[:2], torch.ones(1), qweight, scale, None, "fp8"))
    assert y[0].abs().max() > 0 and y[2].isnan().all()


def test_same_bits_with_any_number_of_rows_and_threads():
    linear, threads = overload("cpu"), torch.get_num_threads()
    codes, x_scale, *weight = operands(100, columns=320, inner=1088, granularity="group", format="fp8_block")
    options = {"format": "fp8_block", "dtype": torch.bfloat16}
    together = linear(codes, x_scale, *weight, **options)
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(codes, x_scale, *weight, **options), together)
    finally:
        torch.set_num_threads(threads)
    for rows in (1, 2, 31, 40):
        assert torch.equal(linear(codes[:rows], x_scale[:rows], *weight, **options), together[:rows])


def test_bad_operands_raise(linear):
    codes, x_scale, *weight = operands(4, columns=64, inner=96, granularity="token", format="fp8")
    options, both = {"format": "fp8", "dtype": torch.bfloat16}, (ValueError, RuntimeError)
    for x, s in (
        (codes[:, :64], x_scale),
        (codes.float(), x_scale),
        (codes, x_scale[:2]),
        (codes, x_scale.double()),
    ):
        with pytest.raises(both):
            linear(x, s, *weight, **options)
    with pytest.raises(both, match="int8"):
        linear(codes, x_scale, *weight, format="int8", dtype=torch.bfloat16)


def test_opcheck(linear):
    given = operands(4, columns=64, inner=96, granularity="token", format="fp8")
    options = {"format": "fp8", "dtype": torch.bfloat16}
    torch.library.opcheck(linear, given, options, test_utils="test_faketensor")  # the others multiply codes
