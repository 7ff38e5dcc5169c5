"""Packed attention, and attention with a bias by distance, in Triton: the cases of the other providers."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.attention.packed import (
    packed_attention_reference,
    packed_relative_attention_reference,
)
from pagebinder.custom_ops.attention.relative import paged_relative_attention_reference
from tests.custom_ops.paged_cases import Case, make_inputs
from tests.custom_ops.test_packed_attention import OPTIONS, PADDING, operands
from tests.custom_ops.triton.test_paged_attention import FORMS, assert_close

HEADS = 4


def bias(heads=HEADS, behind=40, ahead=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(9)
    return 2 * torch.randn(heads, behind + 1 + ahead, generator=generator).to(dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_packed_is_the_reference(provider, options):
    kernel = provider.overload("packed_attention")
    optional = {
        "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0]),
        "alibi_slopes": torch.tensor([0.5, 0.1, 0.0, 0.2]),
    }
    q, k, v, starts = operands()
    for chosen in ({}, optional):
        expected = packed_attention_reference(q, k, v, starts, **chosen, scale=0.2, **options)
        out = kernel(q, k, v, starts, **chosen, scale=0.2, **options)
        assert_close(out, expected)
        assert not out[-PADDING:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_on_tensor_cores(provider, dtype):
    """Rows of q, k and v that are parts of one tensor, as a merged projection leaves them."""
    q, k, v, starts = operands(dtype, heads=(4, 4), widths=(32, 32))
    q, k, v = torch.cat([q, k, v], dim=1).split(4, dim=1)
    expected = packed_attention_reference(q.float(), k.float(), v.float(), starts, scale=0.2, causal=False)
    out = provider.overload("packed_attention")(q, k, v, starts, scale=0.2, causal=False)
    assert out.dtype == dtype and out.is_contiguous()
    assert_close(out, expected)


def test_sequences_of_one_token_and_none(provider):
    kernel = provider.overload("packed_attention")
    q, k, v, _ = operands()
    for starts in ([0, 1, 2, 3], [0], [0, 0, 0], [0, 5, 5]):
        starts = torch.tensor(starts, dtype=torch.int32)
        rows = slice(0, int(starts[-1]) + 1)
        expected = packed_attention_reference(q[rows], k[rows], v[rows], starts, scale=0.2, causal=False)
        assert_close(kernel(q[rows], k[rows], v[rows], starts, scale=0.2, causal=False), expected)
    empty = kernel(q[:0], k[:0], v[:0], torch.zeros(1, dtype=torch.int32), scale=0.2)
    assert empty.shape == (0, q.shape[1], v.shape[2])


@pytest.mark.parametrize(("causal", "ahead"), [(True, 0), (False, 40), (False, 2)])
def test_packed_with_a_bias_by_distance(provider, causal, ahead):
    q, k, v, starts = operands()
    options = {"scale": 0.2, "num_behind": 40, "causal": causal}
    expected = packed_relative_attention_reference(q, k, v, starts, bias(ahead=ahead), **options)
    out = provider.overload("packed_relative_attention")(q, k, v, starts, bias(ahead=ahead), **options)
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["decode", "short decode", "mixed", "many heads"])
def test_paged_with_a_bias_by_distance(provider, name, dtype):
    """Contexts far longer than the distances that have a bias of their own; a bias of the model's dtype."""
    case = FORMS[name]
    inputs = make_inputs(
        Case(case.lengths, dtype, num_kv_heads=case.num_kv_heads, group=case.group, padding=2)
    )
    q, *rest = inputs.operands[:5]
    relative = (bias(q.shape[1], dtype=dtype),)
    options = {"head_dim_v": inputs.options["head_dim_v"], "scale": 0.3, "num_behind": 40}
    out = provider.overload("paged_relative_attention")(q, *rest, *relative, **options)
    cache, *step = rest
    expected = paged_relative_attention_reference(q.float(), cache.float(), *step, *relative, **options)
    assert out.dtype == dtype
    assert_close(out, expected)


def test_operands_that_do_not_fit_are_refused(provider):
    q, k, v, starts = operands()
    packed = provider.overload("packed_attention")
    with pytest.raises(ValueError, match="as many heads"):
        packed(q, k, v[:, :1], starts, scale=0.2)
    with pytest.raises(ValueError, match="one dtype"):
        packed(q, k, v.half(), starts, scale=0.2)
    with pytest.raises(ValueError, match="must be int32"):
        packed(q, k, v, starts.long(), scale=0.2)
    with pytest.raises(ValueError, match="bias must be"):
        provider.overload("packed_relative_attention")(q, k, v, starts, bias(3), scale=0.2, num_behind=40)
