"""RMSNorm in C++, alone and of a sum, against its reference: every tail, type and width."""

import pytest
import torch

from pagebinder.custom_ops.norm.rms_norm import TAILS, add_rms_norm_reference, rms_norm_reference
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import CompilerNotFoundError

EPS = 1e-6
SHAPES = ((1, 64), (3, 37), (0, 16), (2, 5, 40), (130, 1024))


@pytest.fixture(scope="module")
def cpu():
    provider = registered_providers()["cpu"]
    if isinstance(provider.problem(), CompilerNotFoundError):
        pytest.skip(str(provider.problem()))
    provider.prepare("rms_norm")
    return torch.ops.pagebinder_cpu


def values(shape, dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


RTOL = {torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def assert_near(ours: torch.Tensor, exact: torch.Tensor, x: torch.Tensor) -> None:
    """float32 but for the order of the sum; of 16 bits nearly all results have the same bits, the others the next."""
    assert ours.dtype == exact.dtype and ours.shape == exact.shape and ours.is_contiguous()
    torch.testing.assert_close(ours, exact, rtol=RTOL[x.dtype], atol=1e-6)
    if x.dtype != torch.float32:
        assert ours.numel() == 0 or (ours != exact).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("wide_weight", [False, True])
def test_against_the_reference(cpu, dtype, tail, wide_weight):
    for shape in SHAPES:
        x, residual = values(shape, dtype, 1), values(shape, dtype, 2)
        weight = None if tail == "none" else values(shape[-1:], torch.float32 if wide_weight else dtype, 3)
        exact = rms_norm_reference(x, weight, eps=EPS, tail=tail)
        assert_near(cpu.rms_norm(x, weight, eps=EPS, tail=tail), exact, x)
        ours = cpu.add_rms_norm(x, residual, weight, eps=EPS, tail=tail)
        exact = add_rms_norm_reference(x, residual, weight, eps=EPS, tail=tail)
        assert torch.equal(ours[1], exact[1])
        assert_near(ours[0], exact[0], x)


@pytest.mark.parametrize("tail", TAILS[:3])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_weights_of_another_type_are_widened(cpu, dtypes, tail):
    x, weight = values((6, 40), dtypes[0], 6), values((40,), dtypes[1], 7)
    exact = rms_norm_reference(x, weight, eps=EPS, tail=tail)
    assert_near(cpu.rms_norm(x, weight, eps=EPS, tail=tail), exact, x)


def test_rows_that_lie_apart_and_threads_change_no_bit(cpu):
    wide = values((200, 3, 512), torch.bfloat16, 4)
    rows, weight = wide[:, 1], values((512,), torch.bfloat16, 5)
    expected = cpu.rms_norm(rows.contiguous(), weight, eps=EPS, tail="cast_scale")
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(cpu.rms_norm(rows, weight, eps=EPS, tail="cast_scale"), expected)
            alone = cpu.rms_norm(rows[7:8], weight, eps=EPS, tail="cast_scale")
            assert torch.equal(alone, expected[7:8])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("weight", "tail", "says"),
    [
        (torch.ones(8), "plain", "unknown RMSNorm tail"),
        (None, "cast_scale", "needs a weight"),
        (torch.ones(7), "offset", r"weight must be \[C\]"),
    ],
)
def test_wrong_operands_are_named(cpu, weight, tail, says):
    with pytest.raises(RuntimeError, match=says):
        cpu.rms_norm(torch.ones(2, 8), weight, eps=EPS, tail=tail)


def test_sums_of_unlike_tensors_are_refused(cpu):
    with pytest.raises(RuntimeError, match="same shape and dtype"):
        cpu.add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), None, eps=EPS, tail="none")
