"""Norm of heads + RoPE + the cache write: the cpu kernel against the separate ops, in every form."""

from __future__ import annotations

import itertools

import pytest
import torch

from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.providers import registered_providers
from tests.tolerances import TOLERANCES, assert_close

T, H, G, Dv, BLOCKS, BLOCK = 5, 4, 2, 8, 3, 16
SLOTS = torch.tensor([3, -1, 17, 0, 47], dtype=torch.int32)
COMPUTED = "computed"  # in float32, by angles that are not
STYLES = ("half", "chunked", "every_two", "interleaved")
FORMS = list(
    itertools.product(STYLES, ("", "cast_scale", "scale_cast", "offset", "none"), (False, True, COMPUTED))
)


@pytest.fixture(scope="module")
def kernel():
    if build.problem() is not None:
        pytest.skip(str(build.problem()))
    provider = registered_providers()["cpu"]
    provider.prepare("qk_norm_rope_write")
    return provider.overload("qk_norm_rope_write")


def operands(dtype, *, style="half", tail="cast_scale", wide=False, width=24, turned=None):
    """Positional and named operands; `wide`: angles in float32, or COMPUTED; `turned`: channels of a head that turn,
    None: all."""
    generator = torch.Generator().manual_seed(width)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    angles = normal(T, (turned or width) // 2)
    angles = torch.cat((angles, angles), -1) if style == "half" else angles
    angles = angles.repeat_interleave(2, -1) if style == "every_two" else angles
    tables = [table.to(torch.float32 if wide is True else dtype) for table in (angles.cos(), angles.sin())]
    weighted = tail not in ("", "none")
    weights = [(1 + normal(width)).to(dtype) if weighted else None for _ in range(2)]
    v = normal(T, G, 2 * Dv).to(dtype)[..., :Dv]
    cache = torch.full((BLOCKS, G, BLOCK, width + Dv), 7.0, dtype=dtype)
    q, k = normal(H, T, width).transpose(0, 1).to(dtype), normal(T, G, width).to(dtype)
    options = {"eps": 1e-6, "tail": tail, "style": style} | ({"in_float32": True} if wide == COMPUTED else {})
    return (q, k, v, *tables, *weights, cache, SLOTS), options


def assert_near(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """A norm's sum in the order of this machine's lanes may turn a rounding to 16 bits on the way to a result, by a
    unit of what is rounded there: seen once in some thousand values."""
    if actual.dtype is torch.float32:
        assert_close(actual, exact.double())
        return
    difference = (actual.double() - exact.double()).abs()
    tolerance = TOLERANCES[actual.dtype]
    turned = difference > tolerance.atol + tolerance.rtol * exact.double().abs()
    assert turned.double().mean() < 0.001
    assert difference.max() <= torch.finfo(actual.dtype).eps * max(1.0, exact.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "turned"), [(24, None), (64, None), (64, 16), (24, 22), (40, 6)])
def test_against_the_separate_ops(kernel, dtype, width, turned):
    """Without a norm nothing is summed, so the bits are theirs."""
    for style, tail, wide in FORMS:
        form = {"style": style, "tail": tail, "wide": wide, "width": width, "turned": turned}
        (ours, options), (theirs, _) = operands(dtype, **form), operands(dtype, **form)
        out = kernel(*ours, **options)
        expected = torch.ops.pagebinder.qk_norm_rope_write(*theirs, **options)
        assert out.is_contiguous()
        for actual, exact in ((out, expected), (ours[7], theirs[7])):
            assert_near(actual, exact)
            assert tail or torch.equal(actual, exact)


def test_bad_operands_raise(kernel):
    for op in (kernel, torch.ops.pagebinder.qk_norm_rope_write):
        (q, k, v, cos, sin, *rest, cache, slots), options = operands(torch.float32)
        cases = {
            "slot": ((q, k, v, cos, sin, *rest, cache, slots + 1), options),
            "style": ((q, k, v, cos, sin, *rest, cache, slots), {**options, "style": "deinterleaved"}),
            "cos and sin": ((q, k, v, cos[:, :11], sin[:, :11], *rest, cache, slots), options),
            "cos and sin must": ((q, k, v, cos.repeat(1, 2), sin.repeat(1, 2), *rest, cache, slots), options),
            "cos and sin must be": ((q, k, v, cos[:, :12], sin, *rest, cache, slots), options),
        }
        for message, (args, named) in cases.items():
            with pytest.raises((RuntimeError, ValueError), match=message):
                op(*args, **named)


def test_opcheck(kernel):
    args, options = operands(torch.bfloat16)
    torch.library.opcheck(kernel, args, options)


def test_neighbours_turn_as_rope_turns_them(kernel):
    """Against rope itself, in float32 where the model computes so."""
    for style, wide in itertools.product(("every_two", "interleaved"), (False, COMPUTED)):
        (q, k, v, cos, sin, *rest), options = operands(
            torch.bfloat16, style=style, tail="", wide=wide, width=48
        )
        x = q.float() if wide else q
        expected = torch.ops.pagebinder.rope(x, cos[:, None], sin[:, None], style=style).to(q.dtype)
        assert torch.equal(kernel(q, k, v, cos, sin, *rest, **options), expected)


@pytest.mark.parametrize(("style", "turned"), [("half", 8), ("chunked", 12)])
def test_channels_behind_those_that_turn_are_normed_and_kept(style, turned):
    (q, k, v, *rest), options = operands(torch.float32, style=style, turned=turned)
    out = torch.ops.pagebinder.qk_norm_rope_write(q, k, v, *rest, **options)
    cos, sin, weight, cache = rest[0], rest[1], rest[2], rest[4]
    normed = torch.nn.functional.rms_norm(q, q.shape[-1:], weight, options["eps"])
    assert_close(out[..., turned:], normed[..., turned:].double())
    low, high = normed[..., : turned // 2], normed[..., turned // 2 : turned]
    first = low * cos[:, None, : turned // 2] - high * sin[:, None, : turned // 2]
    assert_close(out[..., : turned // 2], first.double())
    assert torch.equal(cache[0, :, 3, 24:], v[0])
