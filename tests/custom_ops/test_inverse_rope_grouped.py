"""Inverse RoPE and the grouped projection: reference against source and definition, providers against it."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.linear.inverse_rope_grouped import (
    inverse_rope_grouped_linear_reference as reference,
)
from pagebinder.custom_ops.linear.inverse_rope_grouped import through_e4m3
from pagebinder.custom_ops.norm.q_norm_rope import rotate_trailing
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# T, H, D, P, groups, r: on both sides of what matrix tiles take (128 rows, multiples of 32).
SIZES = [
    (0, 8, 64, 16, 2, 32), (1, 8, 64, 16, 2, 32), (5, 8, 64, 16, 4, 96), (129, 4, 64, 8, 2, 32),
    (128, 4, 64, 8, 1, 64), (5, 6, 20, 3, 3, 7), (3, 2, 16, 8, 2, 5), (33, 2, 512, 32, 1, 32),
]  # fmt: skip


@pytest.fixture(scope="module", params=["reference", "cpu"])
def op(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    chosen.prepare()
    return chosen.overload("inverse_rope_grouped_linear")


def operands(T, H, D, P, groups, r, dtype=torch.float32, seed=0):
    """x, cos, sin, weight; results are of magnitude about 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, D, generator=generator)
    angles = torch.rand(T, P, generator=generator) * 6
    K = H * D // groups
    weight = torch.randn(groups * r, K, generator=generator) * K**-0.5
    return x.to(dtype), angles.cos(), angles.sin(), weight.to(dtype)


def exact(x, cos, sin, weight, groups, fp8=False):
    """Rows rounded as in the reference, the products in float64."""
    rows = rotate_trailing(x, cos, -sin).reshape(len(x), groups, weight.shape[1])
    rows = (through_e4m3(rows) if fp8 else rows).double()
    return torch.einsum("tgk,grk->tgr", rows, weight.double().view(groups, -1, rows.shape[-1])).flatten(1)


def check(op, x, cos, sin, weight, groups, **options):
    out = op(x, cos, sin, weight, groups=groups, **options)
    assert out.dtype == x.dtype and out.shape == (len(x), len(weight)) and out.is_contiguous()
    assert_close(out, exact(x, cos, sin, weight, groups, **options))


def test_turning_back_undoes_the_rotation():
    x, cos, sin, _ = operands(5, 4, 64, 16, 2, 32)
    torch.testing.assert_close(rotate_trailing(rotate_trailing(x, cos, sin), cos, -sin), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_source_model_computes_the_same(dtype):
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    x, cos, sin, weight = operands(5, 8, 64, 16, 4, 24, dtype)
    cos, sin = cos.to(dtype), sin.to(dtype)
    module = modeling.DeepseekV4GroupedLinear(128, 96, 4).to(dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        turned = modeling.apply_rotary_pos_emb(x[None].transpose(1, 2), cos[None], -sin[None]).transpose(1, 2)
        expected = module(turned.reshape(1, 5, 4, -1)).flatten(2)[0]
    torch.testing.assert_close(reference(x, cos, sin, weight, groups=4), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(op, sizes, dtype):
    check(op, *operands(*sizes, dtype), sizes[4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [s for s in SIZES if s[1] * s[2] // s[4] % 128 == 0], ids=str)
def test_fp8_against_float64(op, sizes, dtype):
    check(op, *operands(*sizes, dtype), sizes[4], fp8=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised_rows_have_the_same_bits(op, dtype):
    """An identity as the weight shows the rows themselves; magnitudes from subnormal e4m3 to large scales."""
    x, cos, sin, _ = operands(40, 2, 128, 16, 2, 128)
    x = (x * 2.0 ** torch.arange(-12, 8, 0.5).view(40, 1, 1)).to(dtype)
    x[3] = 0
    x[4, :, 5] = 448
    x[4, :, 6] = 449
    x[5, :, :] = torch.tensor([448.0, 2.0**-9]).repeat(64)
    x[6, :, ::3] *= 2.0**-9
    weight = torch.eye(128, dtype=dtype).repeat(2, 1)
    got = op(x, cos, sin, weight, groups=2, fp8=True)
    assert torch.equal(got, through_e4m3(rotate_trailing(x, cos, -sin)).flatten(1))
    plain = op(x, cos, sin, weight, groups=2)
    assert torch.equal(plain, rotate_trailing(x, cos, -sin).flatten(1))


def test_known_values_through_e4m3():
    """Blocks whose largest magnitude is a scale's limit, by the rule e = ceil(log2(amax / 448))."""
    x = torch.zeros(5, 128)
    x[0, :3] = torch.tensor([448.0, 17.0, 2.0**-10])  # e = 0: 17 ties to 16; half of the smallest step to 0
    x[1, :2] = torch.tensor([449.0, 34.0])  # e = 1
    x[2, :2] = torch.tensor([1.0, 1 / 3])  # e = -8
    x[3, 0] = 1e-5  # below the least amax of 1e-4: e = -22
    out = through_e4m3(x)
    assert out[0, :3].tolist() == [448.0, 16.0, 0.0]
    assert out[1, :2].tolist() == [448.0, 32.0]
    assert out[2, :2].tolist() == [1.0, 88 / 256]
    assert out[3, 0].item() == 40 * 2.0**-22 and (out[4] == 0).all()


def test_layouts(op):
    x, cos, sin, weight = operands(6, 8, 64, 16, 2, 32, torch.bfloat16)
    expected = op(x, cos, sin, weight, groups=2)
    wide = torch.cat([x, x], -1)
    for strided in (wide[..., 64:], x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT):
        assert torch.equal(op(strided, cos, sin, weight, groups=2), expected)
    table = torch.stack([cos, sin], -1)
    assert torch.equal(op(x, table[..., 0], table[..., 1], weight, groups=2), expected)
    check(op, x, cos, sin, torch.cat([weight, weight], 1)[:, :256], 2)
    check(op, x, cos, sin, weight.T.contiguous().T, 2)


def test_nan_stays_in_its_token_and_group(op):
    x, cos, sin, weight = operands(6, 8, 64, 16, 2, 32, torch.bfloat16)
    x[3, 1, 5] = float("nan")
    for fp8 in (False, True):
        out = op(x, cos, sin, weight, groups=2, fp8=fp8)
        assert out[3, :32].isnan().all() and out.isnan().sum() == 32


def test_errors(op):
    x, cos, sin, weight = operands(4, 6, 20, 3, 3, 8)
    bad = [
        (x[0], cos, sin, weight),
        (x, cos[1:], sin, weight),
        (x, cos, sin, weight[1:]),
        (x, cos, sin, weight[:, 1:]),
    ]
    for args in [*bad, (x, cos, sin, weight.bfloat16())]:
        with pytest.raises((ValueError, RuntimeError), match="must be"):
            op(*args, groups=3)
    with pytest.raises((ValueError, RuntimeError), match="do not divide"):
        op(x, cos, sin, weight, groups=4)
    with pytest.raises((ValueError, RuntimeError), match="multiple of 128"):
        op(x, cos, sin, weight, groups=3, fp8=True)
    with pytest.raises((ValueError, RuntimeError), match="do not fit"):
        op(x[..., :5], cos, sin, weight, groups=3)


def test_opcheck(op):
    args = operands(4, 8, 64, 16, 2, 32, torch.bfloat16)
    torch.library.opcheck(op, args, {"groups": 2, "fp8": True})
