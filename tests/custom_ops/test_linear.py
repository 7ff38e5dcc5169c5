"""The linear layer: every provider against float64, on both sides of the kernel's limits."""

import pytest
import torch

from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.tolerances import assert_close


@pytest.fixture(scope="module", params=["reference", "cpu"])
def linear(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    assert chosen.reasons_against(OpNeed(op="linear", dtype="bfloat16")) == []
    chosen.prepare()
    return chosen.overload("linear")


def operands(rows: int, columns: int, inner: int, dtype=torch.bfloat16, seed: int = 0):
    """x [rows, inner], weight scaled so that outputs are about 1, bias."""
    generator = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(rows, inner, generator=generator), torch.randn(columns, generator=generator)
    weight = torch.randn(columns, inner, generator=generator) * inner**-0.5
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def check(linear, x, weight, bias=None):
    out = linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert out.dtype == x.dtype and out.shape == exact.shape and out.is_contiguous()
    assert_close(out, exact)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 33, 100, 128, 129, 300])
@pytest.mark.parametrize(("columns", "inner"), [(32, 32), (96, 64), (160, 352), (64, 1024), (40, 72)])
def test_against_float64(linear, rows, columns, inner):
    x, weight, bias = operands(rows, columns, inner)
    check(linear, x, weight)
    check(linear, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(linear, dtype):
    check(linear, *operands(7, 64, 96, dtype))


def test_layouts(linear):
    x, weight, bias = operands(12, 64, 96)
    check(linear, x.view(3, 4, 96), weight, bias)
    check(linear, x.view(1, 12, 96), weight)
    check(linear, x[0], weight, bias)
    check(linear, x[::2], weight)
    check(linear, x.view(3, 4, 96).transpose(0, 1), weight)
    check(linear, x.T.contiguous().T, weight)
    check(linear, x, weight.T.contiguous().T, bias)
    check(linear, x[:, :64], weight[:, 32:])
    check(linear, x[:0], weight)


def test_nan_stays_in_its_row(linear):
    x, weight, _ = operands(20, 64, 96)
    x[3, 5] = float("nan")
    out = linear(x, weight)
    assert out[3].isnan().all() and not out[:3].isnan().any() and not out[4:].isnan().any()


def test_bad_sizes_raise(linear):
    x, weight, bias = operands(4, 64, 96)
    with pytest.raises(RuntimeError):
        linear(x[:, :64], weight)
    with pytest.raises(RuntimeError):
        linear(x, weight, bias[:32])


def test_same_bits_with_any_number_of_rows_and_threads():
    """Promised of the kernel for few rows, where the machine has matrix tiles; torch's linear promises nothing."""
    chosen = registered_providers()["cpu"]
    if chosen.problem() is not None:
        pytest.skip(str(chosen.problem()))
    chosen.prepare()
    if not torch.ops.pagebinder_cpu.has_matrix_tiles():
        pytest.skip("this machine has no matrix tiles")
    linear = chosen.overload("linear")
    x, weight, bias = operands(128, 320, 1056)
    threads = torch.get_num_threads()
    together = linear(x, weight, bias)
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x, weight, bias), together)
    finally:
        torch.set_num_threads(threads)
    for rows in (1, 2, 31, 40):
        assert torch.equal(linear(x[:rows], weight, bias), together[:rows])


def test_opcheck(linear):
    torch.library.opcheck(linear, operands(4, 64, 96))
