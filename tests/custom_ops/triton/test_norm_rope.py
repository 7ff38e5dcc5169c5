"""Query norm with RoPE, and inverse RoPE before the grouped projection, in Triton: as in the other providers."""

import pytest
import torch

from tests.custom_ops import test_inverse_rope_grouped as inverse_rope
from tests.custom_ops import test_q_norm_rope as norm_rope
from tests.custom_ops.triton.on_device import DEVICE, OF_A_KERNEL
from tests.helpers import nightly

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def norm(provider):
    return provider.overload("q_norm_rope")


@pytest.fixture(scope="module")
def project(provider):
    return provider.overload("inverse_rope_grouped_linear")


@pytest.mark.parametrize("sizes", [s for s in norm_rope.SIZES if s[0] < 100] + [(13, 5, 64, 16)])
def test_norm_and_rope(norm, sizes):
    """A few tiles of rows; odd widths, no pair and nothing but pairs."""
    for dtype, table_dtype in zip(DTYPES, (torch.float32, torch.float32, torch.float16)):
        norm_rope.check(norm, *norm_rope.operands(*sizes, dtype, table_dtype))


@pytest.mark.parametrize(
    "test", [norm_rope.test_layouts, norm_rope.test_zeros_and_nan, norm_rope.test_errors]
)
def test_norm_and_rope_as_elsewhere(norm, test):
    test(norm)


@pytest.mark.parametrize("sizes", [(min(T, 3), *others) for T, *others in inverse_rope.SIZES], ids=str)
def test_inverse_rope_and_projection(project, sizes):
    for dtype in DTYPES:
        inverse_rope.check(project, *inverse_rope.operands(*sizes, dtype), sizes[4])
        if sizes[1] * sizes[2] // sizes[4] % 128 == 0:
            inverse_rope.check(project, *inverse_rope.operands(*sizes, dtype), sizes[4], fp8=True)


@pytest.mark.parametrize("fp8", [False, True])
def test_heads_of_an_odd_width(project, fp8):
    inverse_rope.check(project, *inverse_rope.operands(5, 128, 7, 2, 1, 9), 1, fp8=fp8)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=nightly), torch.bfloat16])
def test_quantised_rows_have_the_same_bits(project, dtype):
    inverse_rope.test_quantised_rows_have_the_same_bits(project, dtype)


@pytest.mark.parametrize(
    "test",
    [inverse_rope.test_layouts, inverse_rope.test_nan_stays_in_its_token_and_group, inverse_rope.test_errors],
)
def test_inverse_rope_as_elsewhere(project, test):
    test(project)


def test_opcheck(norm, project):
    ops = torch.ops.pagebinder_triton
    args = [x.to(DEVICE) for x in norm_rope.operands(4, 3, 40, 6, torch.bfloat16)]
    torch.library.opcheck(ops.q_norm_rope, args, {"eps": norm_rope.EPS}, test_utils=OF_A_KERNEL)
    args = [x.to(DEVICE) for x in inverse_rope.operands(4, 8, 64, 16, 2, 32, torch.bfloat16)]
    op, options = ops.inverse_rope_grouped_linear, {"groups": 2, "fp8": True}
    torch.library.opcheck(op, args, options, test_utils=OF_A_KERNEL)
