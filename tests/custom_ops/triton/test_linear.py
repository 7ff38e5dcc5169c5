"""Linear layers of few rows in Triton: alone, together and gated, as in the other providers."""

import pytest
import torch
from torch.testing import assert_close

from tests.custom_ops import test_linear as cases

FEW = [1, 2, 5, 16]
BEYOND = 17


@pytest.fixture(scope="module")
def linear(provider):
    return provider.overload("linear")


@pytest.mark.parametrize("rows", [*FEW, BEYOND])
@pytest.mark.parametrize(
    ("columns", "inner"), [(32, 32), (96, 64), (160, 352), (64, 1024), (40, 80), (40, 72)]
)
def test_against_float64(linear, rows, columns, inner):
    """Rows and k that fill tiles and that do not; 72 are no multiple of what loads ask for."""
    cases.test_against_float64(linear, rows, columns, inner)


@pytest.mark.parametrize("rows", [3, BEYOND])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(linear, rows, dtype):
    cases.test_other_types(linear, rows, dtype)


@pytest.mark.parametrize("rows", [1, 6, BEYOND])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_siblings_have_the_bits_of_each_layer_alone(provider, rows, dtype):
    cases.test_siblings_have_the_bits_of_each_layer_alone(provider, rows, dtype)


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_any_number_of_siblings(provider, number):
    """More than a launch takes."""
    x, weight, bias = cases.operands(3, 48 * number, 64)
    weights, biases = list(weight.split(48)), list(bias.split(48))
    exact = x.double() @ weight.double().T + bias.double()
    for y, z in zip(provider.overload("linears")(x, weights, biases), exact.split(48, 1), strict=True):
        cases.assert_close(y, z)


@pytest.mark.parametrize("rows", [1, 6, BEYOND])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gated_layers_equal_two_layers_and_a_gate(provider, rows, dtype):
    cases.test_gated_layers_equal_two_layers_and_a_gate(provider, rows, dtype)


@pytest.mark.parametrize("rows", FEW[1:])
def test_rows_have_the_same_bits_alone(linear, rows):
    """A lone row is summed in registers, in an order of its own."""
    x, weight, bias = cases.operands(16, 160, 352)
    assert torch.equal(linear(x[:rows], weight, bias), linear(x, weight, bias)[:rows])


def test_a_bias_for_some_of_the_siblings_is_refused(provider):
    cases.test_a_bias_for_some_of_the_siblings_is_refused(provider)


@pytest.mark.parametrize(
    "test", [cases.test_layouts, cases.test_nan_stays_in_its_row, cases.test_bad_sizes_raise]
)
def test_as_elsewhere(linear, test):
    test(linear)


NORMS = [  # has a residual, tail, the weight's dtype if it is not x's
    (True, "cast_scale", None), (False, "scale_cast", None), (True, "offset", None), (False, "none", None),
    (True, "scale_cast", torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("rows", [1, 3, BEYOND])
@pytest.mark.parametrize(("has_residual", "tail", "weight_dtype"), NORMS)
def test_a_norm_with_its_layers_equals_the_two(
    provider, has_residual, tail, weight_dtype, rows, activation, dtype
):
    torch.manual_seed(0)
    inner, sizes = 352, (48, 48) if activation else (48, 21, 64, 32)
    x, residual = torch.randn(2, rows, inner).to(dtype).unbind(0)
    norm_weight = None if tail == "none" else torch.rand(inner).to(weight_dtype or dtype)
    weights = [(torch.randn(n, inner) / inner**0.5).to(dtype) for n in sizes]
    biases = [torch.randn(n).to(dtype) for n in sizes]
    operands = (x, residual if has_residual else None, norm_weight, weights, biases)
    options = {"eps": 1e-6, "tail": tail, "activation": activation}
    found = provider.overload("norm_linears")(*operands, **options)
    expected = torch.ops.pagebinder.norm_linears(*operands, **options)
    assert len(found) == len(expected) == (1 if activation else 4) + has_residual
    if has_residual:
        assert torch.equal(found[-1], expected[-1])
    for y, z in zip(found, expected, strict=True):
        assert y.dtype == z.dtype and y.shape == z.shape
        assert_close(y.float(), z.float(), atol=3e-2 if dtype == torch.bfloat16 else 5e-3, rtol=2e-2)


@pytest.mark.parametrize("inner", [4096, 9216])
@pytest.mark.parametrize("columns", [64, 45])
def test_one_long_row(provider, inner, columns):
    """One that programs keep, and a longer one; columns that fill tiles and that do not."""
    torch.manual_seed(1)
    x, weight = torch.randn(1, inner).bfloat16(), (torch.randn(columns, inner) / inner**0.5).bfloat16()
    y = provider.overload("linear")(x, weight)
    cases.assert_close(y, x.double() @ weight.double().T)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tail": "other"}, "unknown RMSNorm tail"),
        ({"norm_weight": torch.ones(3)}, r"weight must be \[32\]"),
        ({"residual": torch.zeros(1, 16)}, "one shape and dtype"),
        ({"weights": [torch.ones(32, 32)], "activation": "silu"}, "a gate has two weights"),
        ({"weights": [torch.ones(32, 32), torch.ones(16, 32)], "activation": "silu"}, "must be alike"),
    ],
)
def test_bad_norms_and_gates_raise(provider, changes, message):
    operands = {
        "x": torch.ones(1, 32),
        "residual": None,
        "norm_weight": torch.ones(32),
        "weights": [torch.ones(32, 32)],
    }
    operands |= {"biases": [], "eps": 1e-6, "tail": "cast_scale"}
    given = {n: v.bfloat16() if isinstance(v, torch.Tensor) else v for n, v in (operands | changes).items()}
    given["weights"] = [w.bfloat16() for w in given["weights"]]
    with pytest.raises(ValueError, match=message):
        provider.overload("norm_linears")(**given)
