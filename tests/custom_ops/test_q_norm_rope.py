"""Query norm with RoPE: the reference against its parts and its source, every provider against the reference."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.norm.q_norm_rope import q_norm_rope_reference, rotate_trailing
from pagebinder.custom_ops.norm.rms_norm import rms_norm_reference
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.custom_ops.rope.rope import rope_reference
from pagebinder.errors import CompilerNotFoundError

EPS = 1e-6
# The largest relative error of one rounding; for float32 that of the sum of squares.
ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-9, torch.float16: 2**-12}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# T, H, D, P: nothing, one token, odd counts; widths with and without a whole vector, no pair and nothing but pairs.
SIZES = [
    (0, 4, 32, 8),
    (1, 64, 512, 32),
    (5, 3, 40, 6),
    (129, 17, 64, 16),
    (2, 2, 7, 1),
    (3, 2, 12, 6),
    (3, 2, 9, 0),
]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def op(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    chosen.prepare()
    return chosen.overload("q_norm_rope")


def operands(T, H, D, P, dtype=torch.float32, table_dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(T, H, D, generator=generator) * 3
    angles = torch.rand(T, P, generator=generator) * 6
    return q.to(dtype), angles.cos().to(table_dtype), angles.sin().to(table_dtype)


def check(op, q, cos, sin):
    """Two values are rounded before they turn, and the result once more: at most 3.5 roundings of the largest."""
    out = op(q, cos, sin, eps=EPS)
    assert out.dtype == q.dtype and out.shape == q.shape and out.is_contiguous()
    largest = rms_norm_reference(q.float(), eps=EPS, tail="none").abs().amax(-1, keepdim=True)
    error = (out.float() - q_norm_rope_reference(q.float(), cos, sin, eps=EPS)).abs()
    assert (error <= 3.5 * ROUNDING[q.dtype] * largest).all()
    if (
        q.numel() and q.dtype is not torch.float32
    ):  # the order of a sum seldom decides what a value is rounded to
        assert (out == q_norm_rope_reference(q, cos, sin, eps=EPS)).float().mean() > 0.99


def test_the_reference_is_the_norm_and_then_the_rotation():
    q, cos, sin = operands(5, 3, 40, 6, torch.bfloat16)
    normed = rms_norm_reference(q, eps=EPS, tail="none")
    turned = rope_reference(normed[..., 28:].float(), cos.unsqueeze(1), sin.unsqueeze(1), style="interleaved")
    expected = torch.cat([normed[..., :28], turned.bfloat16()], -1)
    assert torch.equal(q_norm_rope_reference(q, cos, sin, eps=EPS), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_source_model_computes_the_same(dtype):
    """In bfloat16 the source rounds the norm's factor as well: one more rounding of each value."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    q, cos, sin = operands(5, 3, 40, 6, dtype, dtype)
    normed = modeling.DeepseekV4UnweightedRMSNorm(EPS)(q.transpose(0, 1)[None])
    expected = modeling.apply_rotary_pos_emb(normed, cos[None], sin[None])[0].transpose(0, 1)
    got = q_norm_rope_reference(q, cos, sin, eps=EPS)
    rtol, atol = (1e-6, 1e-6) if dtype is torch.float32 else (2**-7, 2**-6)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    rotated = modeling.apply_rotary_pos_emb(q.transpose(0, 1)[None], cos[None], sin[None])[0].transpose(0, 1)
    assert torch.equal(rotate_trailing(q, cos, sin), rotated)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_the_reference(op, sizes, dtype):
    check(op, *operands(*sizes, dtype))
    check(op, *operands(*sizes, dtype, dtype))


def test_layouts(op):
    q, cos, sin = operands(6, 4, 40, 6, torch.bfloat16)
    contiguous = op(q, cos, sin, eps=EPS)
    wide = torch.cat([q, q], -1)
    for strided in (wide[..., :40], wide[..., 40:], q.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(op(strided, cos, sin, eps=EPS), contiguous)
    assert torch.equal(op(q.mT.contiguous().mT, cos, sin, eps=EPS), contiguous)
    table = torch.stack([cos, sin], -1)
    assert torch.equal(op(q, table[..., 0], table[..., 1], eps=EPS), contiguous)
    row = cos[:1].expand(6, -1)
    assert torch.equal(op(q, row, sin, eps=EPS), op(q, row.contiguous(), sin, eps=EPS))


def test_zeros_and_nan(op):
    q, cos, sin = operands(4, 3, 40, 6)
    q[1] = 0
    q[2, 1, 3] = float("nan")
    out = op(q, cos, sin, eps=EPS)
    assert (out[1] == 0).all()
    assert out[2, 1].isnan().all() and out.isnan().sum() == 40


def test_errors(op):
    q, cos, sin = operands(4, 3, 40, 6)
    bad = [(q[0], cos, sin), (q, cos[1:], sin[1:]), (q, cos[:, 1:], sin), (q, cos[0], sin[0])]
    for args in bad:
        with pytest.raises((ValueError, RuntimeError), match="must be"):
            op(*args, eps=EPS)
    with pytest.raises((ValueError, RuntimeError), match="do not fit"):
        op(q[..., :11], cos, sin, eps=EPS)


def test_opcheck(op):
    torch.library.opcheck(op, operands(4, 3, 40, 6, torch.bfloat16), {"eps": EPS})
