"""The RoPE op: each style against its definition."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.providers import registered_providers
from pagebinder.custom_ops.rope.rope import STYLES, rope_reference
from pagebinder.errors import CompilerNotFoundError


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 8, generator=generator).to(dtype)
    angles = torch.rand(5, 4, generator=generator) * 6
    return x, angles


def test_interleaved_is_the_product_of_complex_numbers():
    x, angles = operands()
    turned = torch.view_as_complex(x.reshape(3, 5, 4, 2)) * torch.polar(torch.ones_like(angles), angles)
    got = torch.ops.pagebinder.rope(x, angles.cos(), angles.sin(), style="interleaved")
    torch.testing.assert_close(got, torch.view_as_real(turned).flatten(-2), atol=1e-6, rtol=1e-6)


def test_half_and_interleaved_differ_by_the_order_of_channels():
    x, angles = operands()
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    half = rope_reference(x[..., order], angles.cos().repeat(1, 2), angles.sin().repeat(1, 2), style="half")
    interleaved = rope_reference(x, angles.cos(), angles.sin(), style="interleaved")
    torch.testing.assert_close(half, interleaved[..., order], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_a_rotation_keeps_lengths_and_relative_angles(style):
    """q at p and k at j score as q at p + 7 and k at j + 7."""
    x, _ = operands()
    frequencies = (1 / 10 ** torch.arange(4)).repeat(2 if style == "half" else 1)

    def turn(position):
        angles = position * frequencies
        return rope_reference(x, angles.cos(), angles.sin(), style=style)

    torch.testing.assert_close(turn(9).norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close((turn(9)[0] * turn(4)[1]).sum(-1), (turn(16)[0] * turn(11)[1]).sum(-1))


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_the_result_has_the_promoted_dtype(style):
    x, angles = operands(torch.bfloat16)
    columns = angles.repeat(1, 2) if style == "half" else angles
    for dtype in (torch.bfloat16, torch.float32):
        got = torch.ops.pagebinder.rope(x, columns.cos().to(dtype), columns.sin().to(dtype), style=style)
        assert got.dtype is dtype and got.shape == x.shape


def test_an_unknown_style_is_an_error():
    x, angles = operands()
    with pytest.raises(ValueError, match="unknown RoPE style 'spiral'"):
        rope_reference(x, angles.cos(), angles.sin(), style="spiral")


@pytest.fixture(scope="module")
def cpu():
    provider = registered_providers()["cpu"]
    if isinstance(provider.problem(), CompilerNotFoundError):
        pytest.skip(str(provider.problem()))
    provider.prepare("rope")
    return torch.ops.pagebinder_cpu.rope


@pytest.mark.parametrize("wide_tables", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", STYLES)
def test_the_kernel_has_the_references_bits(cpu, style, dtype, wide_tables):
    generator = torch.Generator().manual_seed(2)
    of_tables = torch.float32 if wide_tables else dtype

    def made(*shape, of=dtype):
        return torch.randn(shape, generator=generator).to(of)

    for width in (2, 6, 64, 80):
        columns = width if style in ("half", "every_two") else width // 2
        wider, cos, sin = made(2, 5, 3, width + 4), *(made(2, 1, 3, columns, of=of_tables) for _ in range(2))
        x = wider[..., 2:-2]
        per_row = cos[0, 0][:, None, None], sin[0, 0][:, None, None]
        every_other = made(3, 2 * columns, of=of_tables)[:, ::2]
        for operands in (
            (x, cos, sin),
            (x.transpose(0, 2), *per_row),
            (x[0, 0], cos[0, 0], sin[0, 0, :1]),
            (x[0, 0], every_other, every_other.flip(0)),
            (x[:, :, None], cos[:1, :, None], sin[:, :, None]),
            (wider[..., : 2 * (width // 2) : 1][:0], cos[:1], sin[:1]),
            (made(3, 2 * width)[:, ::2], cos[0, 0], sin[0, 0]),
        ):
            got, expected = cpu(*operands, style=style), rope_reference(*operands, style=style)
            assert got.dtype is expected.dtype and torch.equal(got, expected) and got.is_contiguous()


def test_threads_change_no_bit_of_a_rotation(cpu):
    generator = torch.Generator().manual_seed(3)
    x, cos, sin = (
        torch.randn(shape, generator=generator) for shape in ((400, 8, 64), (400, 1, 64), (400, 1, 64))
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(cpu(x, cos, sin, style="half"), rope_reference(x, cos, sin, style="half"))
    finally:
        torch.set_num_threads(before)


def test_wrong_operands_of_the_kernel_are_named(cpu):
    x = torch.ones(3, 8)
    for arguments, says in (
        ((x, x, x, "spiral"), "unknown RoPE style spiral"),
        ((x, x[:, :4], x[:, :4], "half"), "8 wide"),
        ((x[:, :7], x, x, "half"), "D even"),
        ((x, x[:2], x[:2], "half"), "broadcast"),
    ):
        with pytest.raises(RuntimeError, match=says):
            cpu(*arguments[:3], style=arguments[3])
