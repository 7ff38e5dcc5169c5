"""RMSNorm, RoPE, gated activations and the fused write in Triton against their references, in every form."""

import itertools

import pytest
import torch

from pagebinder.custom_ops.activation.gated_activation import ACTIVATIONS
from pagebinder.custom_ops.norm.rms_norm import TAILS
from pagebinder.custom_ops.rope.rope import STYLES
from tests.custom_ops.test_qk_norm_rope_write import FORMS, operands
from tests.tolerances import TOLERANCES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_close(actual, expected, dtype):
    """Sums in another order can round to a neighbour in `dtype`, twice in a chain; float32 as everywhere."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape and actual.is_contiguous()
    tolerance = max(2 * torch.finfo(dtype).eps, TOLERANCES[torch.float32].rtol)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(provider, dtype, tail):
    for shape, weight_dtype in (((3, 5, 40), dtype), ((7, 700), torch.float32), ((0, 16), dtype)):
        generator = torch.Generator().manual_seed(shape[-1])
        x, residual = (
            torch.randn(*shape[:-1], shape[-1] + 3, generator=generator).to(dtype) for _ in range(2)
        )
        x, residual = x[..., :-3], residual[..., 3:]
        weight = None if tail == "none" else torch.randn(shape[-1], generator=generator).to(weight_dtype)
        options = {"eps": 1e-5, "tail": tail}
        norm = provider.overload("rms_norm")
        assert_close(norm(x, weight, **options), torch.ops.pagebinder.rms_norm(x, weight, **options), dtype)
        ours, total = provider.overload("add_rms_norm")(x, residual, weight, **options)
        theirs, expected_total = torch.ops.pagebinder.add_rms_norm(x, residual, weight, **options)
        assert torch.equal(total, expected_total)
        assert_close(ours, theirs, dtype)


@pytest.mark.parametrize("style", STYLES)
def test_rope_has_the_bits_of_the_reference(provider, style):
    generator = torch.Generator().manual_seed(0)
    for dtype, table_dtype in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)):
        x = torch.randn(2, 9, 3, 24, generator=generator).to(dtype).transpose(1, 2)
        angles = torch.randn(9, 12, generator=generator)
        if style in ("half", "every_two"):
            angles = torch.cat((angles, angles), -1) if style == "half" else angles.repeat_interleave(2, -1)
        tables = [table.to(table_dtype) for table in (angles.cos(), angles.sin())]
        ours = provider.overload("rope")(x, *tables, style=style)
        assert torch.equal(ours, torch.ops.pagebinder.rope(x, *tables, style=style))
        flat = [x[0, 0], tables[0], tables[1]]
        ours = provider.overload("rope")(*flat, style=style)
        assert torch.equal(ours, torch.ops.pagebinder.rope(*flat, style=style))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(provider, activation):
    for dtype in DTYPES:
        both = torch.linspace(-30, 30, 3 * 140).view(3, 140).to(dtype)
        gate, up = both[:, :70], both[:, 70:].flip(0) / 30
        ours = provider.overload("gated_activation")(gate, up, activation=activation)
        assert_close(ours, torch.ops.pagebinder.gated_activation(gate, up, activation=activation), dtype)


def test_qk_norm_rope_write(provider):
    """Without a norm nothing is summed, so the bits are those of the separate ops."""
    write = provider.overload("qk_norm_rope_write")
    for (style, tail, wide), dtype, (width, turned) in zip(
        FORMS[::2] + FORMS[1::4],
        itertools.cycle(DTYPES),
        itertools.cycle(((24, None), (64, None), (64, 16), (40, 6))),
    ):
        form = {"style": style, "tail": tail, "wide": wide, "width": width, "turned": turned}
        (ours, options), (theirs, _) = operands(dtype, **form), operands(dtype, **form)
        out = write(*ours, **options)
        expected = torch.ops.pagebinder.qk_norm_rope_write(*theirs, **options)
        for actual, exact in ((out, expected), (ours[7], theirs[7])):
            assert tail or torch.equal(actual, exact)
            assert_close(actual, exact, dtype)


def test_bad_operands_raise(provider):
    x, weight = torch.randn(3, 8), torch.ones(8)
    for op, args, options, message in (
        ("rms_norm", (x, weight[:7]), {"eps": 1e-6, "tail": "offset"}, "weight must be"),
        ("rms_norm", (x, weight), {"eps": 1e-6, "tail": "head"}, "unknown RMSNorm tail"),
        ("add_rms_norm", (x, x[:2], weight), {"eps": 1e-6, "tail": "offset"}, "one shape"),
        ("rope", (x, x, x), {"style": "spiral"}, "unknown RoPE style"),
        ("rope", (x, x, x), {"style": "chunked"}, "4 wide"),
        ("gated_activation", (x, x), {"activation": "step"}, "unknown activation"),
        ("gated_activation", (x, x.half()), {"activation": "silu"}, "one shape and dtype"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            provider.overload(op)(*args, **options)
