"""LayerNorm in C++, alone and of a sum, against torch's."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.norm.layer_norm import add_layer_norm_reference, layer_norm_reference
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import CompilerNotFoundError

EPS = 1e-5
SHAPES = ((1, 64), (3, 37), (0, 16), (2, 5, 40), (130, 1024), (6, 3))


@pytest.fixture(scope="module")
def cpu():
    provider = registered_providers()["cpu"]
    if isinstance(provider.problem(), CompilerNotFoundError):
        pytest.skip(str(provider.problem()))
    provider.prepare("layer_norm")
    return torch.ops.pagebinder_cpu


def values(shape, dtype, seed: int) -> torch.Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 1).to(dtype)


def assert_near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """float32 but for the order of the sums; of 16 bits nearly all have the same bits, the others the next."""
    assert ours.dtype == exact.dtype and ours.shape == exact.shape and ours.is_contiguous()
    rtol = {torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[ours.dtype]
    torch.testing.assert_close(ours, exact, rtol=rtol, atol=4e-6 if ours.dtype is torch.float32 else 1e-3)
    if ours.dtype != torch.float32:
        assert ours.numel() == 0 or (ours != exact).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", ["both", "weight", "none", "wide"])
def test_against_torch(cpu, dtype, given):
    for shape in SHAPES:
        x, residual = values(shape, dtype, 1), values(shape, dtype, 2)
        of_type = torch.float32 if given == "wide" else dtype
        weight = None if given == "none" else values(shape[-1:], of_type, 3)
        bias = values(shape[-1:], of_type, 4) if given in ("both", "wide") else None
        assert_near(cpu.layer_norm(x, weight, bias, eps=EPS), layer_norm_reference(x, weight, bias, eps=EPS))
        ours = cpu.add_layer_norm(x, residual, weight, bias, eps=EPS)
        exact = add_layer_norm_reference(x, residual, weight, bias, eps=EPS)
        assert torch.equal(ours[1], exact[1])
        assert_near(ours[0], exact[0])


def test_values_far_from_zero_keep_their_spread(cpu):
    """The variance is that of differences from the mean: E[x^2] - E[x]^2 would lose it."""
    x = values((5, 512), torch.float32, 5) + 4096
    exact = torch.nn.functional.layer_norm(x.double(), (512,))
    torch.testing.assert_close(cpu.layer_norm(x, eps=EPS).double(), exact, rtol=0, atol=2e-3)


def test_rows_that_lie_apart_and_threads_change_no_bit(cpu):
    wide = values((200, 3, 500), torch.bfloat16, 6)
    rows, weight = wide[:, 1], values((500,), torch.bfloat16, 7)
    expected = cpu.layer_norm(rows.contiguous(), weight, weight, eps=EPS)
    apart = values((1000,), torch.bfloat16, 0)
    apart[::2] = weight
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(cpu.layer_norm(rows, apart[::2], weight, eps=EPS), expected)
            assert torch.equal(cpu.layer_norm(rows[7:8], weight, weight, eps=EPS), expected[7:8])
    finally:
        torch.set_num_threads(before)


def test_rows_of_one_value_are_their_bias(cpu):
    assert (
        cpu.layer_norm(values((4, 1), torch.float16, 8), torch.ones(1), torch.full((1,), 0.3), eps=EPS)
        .eq(torch.tensor(0.3).half())
        .all()
    )


def test_wrong_operands_are_named(cpu):
    with pytest.raises(RuntimeError, match=r"weight must be \[C\]"):
        cpu.layer_norm(torch.ones(2, 8), torch.ones(7), eps=EPS)
    with pytest.raises(RuntimeError, match="same shape and dtype"):
        cpu.add_layer_norm(torch.ones(2, 8), torch.ones(1, 8), eps=EPS)
