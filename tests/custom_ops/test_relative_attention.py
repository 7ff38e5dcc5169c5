"""Attention with a bias by distance: the reference against torch with the bias spelt out, the paged form, kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagebinder.custom_ops.attention.packed import packed_relative_attention_reference
from pagebinder.custom_ops.attention.relative import (
    paged_relative_attention_reference,
    relative_attention_reference,
)
from tests.custom_ops.paged_cases import Case, cases, make_inputs
from tests.custom_ops.test_packed_attention import operands
from tests.custom_ops.test_paged_attention import provider, relaxed  # noqa: F401  (a fixture)
from tests.tolerances import assert_close

HEADS, KV_HEADS, D, DV, BLOCK = 4, 2, 8, 6, 4
BEHIND = 5


def rows(num, heads, width, seed):
    return torch.randn(num, heads, width, generator=torch.Generator().manual_seed(seed))


def bias(ahead):
    return 2 * torch.randn(HEADS, BEHIND + 1 + ahead, generator=torch.Generator().manual_seed(9))


def spelt_out(q, k, v, bias_HN, causal):
    """Scores of every query and key, entry by entry."""
    num_tokens = len(q)
    mask = torch.full((HEADS, num_tokens, num_tokens), float("-inf"))
    for p in range(num_tokens):
        for j in range(num_tokens):
            if j <= p or not causal:
                mask[:, p, j] = bias_HN[:, min(max(j - p + BEHIND, 0), bias_HN.shape[1] - 1)]
    out = sdpa(*(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, scale=0.4, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize(("causal", "ahead"), [(True, 0), (False, BEHIND), (False, 2)])
@pytest.mark.parametrize("num_tokens", [1, 4, 13])
def test_the_reference_equals_torch(num_tokens, causal, ahead):
    q, k, v = (
        rows(num_tokens, HEADS, D, 0),
        rows(num_tokens, KV_HEADS, D, 1),
        rows(num_tokens, KV_HEADS, DV, 2),
    )
    got = relative_attention_reference(q, k, v, bias(ahead), scale=0.4, num_behind=BEHIND, causal=causal)
    assert_close(got, spelt_out(q, k, v, bias(ahead), causal))


def test_the_paged_form_equals_separate_sequences():
    """Prefill, chunk, decode, a row without queries, and padding rows."""
    seq_lens, query_lens = (9, 17, 14, 6), (9, 4, 1, 0)
    tables = torch.tensor(
        [[3, 1, 2, 0, 0], [4, 9, 8, 7, 6], [10, 5, 12, 11, 0], [13, 14, 0, 0, 0], [0] * 5]
    ).int()
    cache = torch.full((16, KV_HEADS, BLOCK, D + DV), torch.nan)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    q = rows(int(starts[-1]) + 2, HEADS, D, 3)
    expected = torch.zeros(len(q), HEADS, DV)
    for r, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens)):
        k, v = rows(seq_len, KV_HEADS, D, 10 + r), rows(seq_len, KV_HEADS, DV, 20 + r)
        j = torch.arange(seq_len)
        cache[tables[r, j // BLOCK].long(), :, j % BLOCK] = torch.cat([k, v], dim=-1)
        whole = torch.cat([rows(seq_len - query_len, HEADS, D, 30), q[starts[r] : starts[r + 1]]])
        mine = slice(starts[r], starts[r + 1])
        expected[mine] = spelt_out(whole, k, v, bias(0), True)[seq_len - query_len :]
    got = paged_relative_attention_reference(
        q,
        cache,
        tables,
        torch.tensor(seq_lens).int(),
        starts,
        bias(0),
        head_dim_v=DV,
        scale=0.4,
        num_behind=BEHIND,
    )
    assert_close(got, expected)


def test_a_bias_that_does_not_fit_is_refused():
    q = torch.empty(3, HEADS, D)
    for bad, behind in ((torch.empty(2, 6), 5), (torch.empty(HEADS, 6), 6), (torch.empty(HEADS, 2, 6), 1)):
        with pytest.raises(ValueError, match="bias must be"):
            torch.ops.pagebinder.relative_attention(
                q.to("meta"), q.to("meta"), q.to("meta"), bad, scale=1.0, num_behind=behind
            )


# Decodes of one and several heads a KV head, a request without new tokens, chunks, and whole prompts; contexts both
# within and far beyond the distances that have a bias of their own.
LENGTHS = {
    "decode": ((600, 1), (30, 1), (0, 1)),
    "mixed": ((600, 1), (20, 50), (530, 2), (9, 0), (0, 1)),
    "prompts": ((0, 40), (0, 9)),
}


def learned(heads, distances, dtype=torch.float32):
    return 2 * torch.randn(heads, distances, generator=torch.Generator().manual_seed(9)).to(dtype)


def check_paged(provider, case, behind=40, ahead=0, causal=True):  # noqa: F811
    inputs = make_inputs(case)
    q, cache, *step = inputs.operands[:5]
    bias_HN = learned(q.shape[1], behind + 1 + ahead, case.dtype)
    options = {name: inputs.options[name] for name in ("head_dim_v", "scale")}
    options |= {"num_behind": behind, "causal": causal}
    out = provider.overload("paged_relative_attention")(q, cache, *step, bias_HN, **options)
    expected = paged_relative_attention_reference(q.float(), cache.float(), *step, bias_HN, **options)
    assert out.dtype == case.dtype and out.is_contiguous()
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(2, 1), (1, 3), (1, 35)])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_paged_kernel_is_the_reference(provider, name, num_kv_heads, group, dtype):  # noqa: F811
    check_paged(provider, Case(LENGTHS[name], dtype, num_kv_heads=num_kv_heads, group=group, padding=2))


@settings(relaxed, max_examples=60)
@given(case=cases(), behind=st.integers(0, 70), ahead=st.integers(0, 9), causal=st.booleans())
def test_the_paged_kernel_in_random_cases(provider, case, behind, ahead, causal):  # noqa: F811
    check_paged(provider, case, behind, ahead, causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("causal", "ahead"), [(True, 0), (False, 40), (False, 2)])
def test_the_packed_kernel_is_the_reference(provider, causal, ahead, dtype):  # noqa: F811
    q, k, v, starts = operands(dtype)
    bias_HN = learned(q.shape[1], 41 + ahead)
    options = {"scale": 0.2, "num_behind": 40, "causal": causal}
    out = provider.overload("packed_relative_attention")(q, k, v, starts, bias_HN, **options)
    expected = packed_relative_attention_reference(
        q.float(), k.float(), v.float(), starts, bias_HN, **options
    )
    assert_close(out, expected)


def test_a_kernel_refuses_a_bias_that_does_not_fit(provider):  # noqa: F811
    q, *step = make_inputs(Case(((3, 2),))).operands[:5]
    kernel = provider.overload("paged_relative_attention")
    for bad, behind in (
        (learned(3, 6), 5),
        (learned(4, 6), 6),
        (learned(4, 6), -1),
        (learned(4, 6)[None], 1),
    ):
        with pytest.raises((ValueError, RuntimeError), match="bias must be"):
            kernel(q, *step, bad, head_dim_v=32, scale=1.0, num_behind=behind)
