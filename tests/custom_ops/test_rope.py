"""The RoPE op: each style against its definition."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.rope.rope import rope_reference


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
