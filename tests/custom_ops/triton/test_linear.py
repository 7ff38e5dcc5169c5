"""Linear layers of few rows in Triton: alone, together and gated, as in the other providers."""

import pytest
import torch

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
