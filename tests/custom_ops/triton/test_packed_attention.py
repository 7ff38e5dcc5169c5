"""Packed attention, and attention with a bias by distance, in Triton: the cases of the other providers."""

from __future__ import annotations

import pytest
import torch

from pagebinder.custom_ops.attention.packed import packed_attention_reference
from tests.custom_ops.test_packed_attention import OPTIONS, PADDING, operands
from tests.custom_ops.test_relative_attention import (  # noqa: F401  (run here with the provider of this folder)
    test_a_kernel_refuses_a_bias_that_does_not_fit,
    test_a_kernel_refuses_sinks_that_do_not_fit,
    test_the_packed_kernel_is_the_reference,
    test_the_paged_kernel_in_every_form,
    test_the_paged_kernel_is_the_reference,
)
from tests.custom_ops.triton.test_paged_attention import assert_close


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
        provider.overload("packed_relative_attention")(
            q, k, v, starts, torch.zeros(3, 41), scale=0.2, num_behind=40
        )
