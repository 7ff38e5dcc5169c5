"""Attention to chosen groups of keys: the reference spelt out key by key, the paged form, kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.custom_ops.attention.indexed import (
    indexed_attention_reference,
    paged_indexed_attention_reference,
)
from tests.custom_ops.paged_cases import Case, cases, make_inputs
from tests.custom_ops.test_paged_attention import provider, relaxed  # noqa: F401  (a fixture)
from tests.tolerances import assert_close


def lists(seq_lens, starts, num_tokens, topk, ratio, seed=0, ordered=True):
    """Random entries of every query, each once, and some it does not see or that are none; all for every third."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    for r, seq_len in enumerate(seq_lens.tolist()):
        for t in range(starts[r], starts[r + 1]):
            p = seq_len - (int(starts[r + 1]) - t)
            number = (p + 1) // ratio + (0 if ordered else 2)
            some = torch.randperm(number, generator=generator)[:topk]
            some = torch.arange(min(number, topk)) if t % 3 == 0 else some
            indices[t, : len(some)] = some.sort().values if ordered else some
    return indices


def sees(p, j, listed, ratio):
    """The mask, spelt out."""
    visible = (p + 1) // ratio
    return j <= p and (j >= visible * ratio or j // ratio in listed)


def spelt_out(q, k, v, indices, ratio, scale):
    """One sequence in float64, query by query."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for p in range(len(q)):
        keys = [j for j in range(len(k)) if sees(p, j, set(indices[p].tolist()) - {-1}, ratio)]
        for h in range(q.shape[1]) if keys else ():
            g = h * k.shape[1] // q.shape[1]
            weights = torch.softmax(k[keys, g].double() @ q[p, h].double() * scale, dim=0)
            out[p, h] = weights @ v[keys, g].double()
    return out


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "topk", "ratio"), [(1, 3, 4), (13, 2, 4), (30, 3, 1), (23, 1, 7), (9, 9, 2)]
)
def test_the_reference_is_the_formula(num_tokens, topk, ratio, ordered):
    generator = torch.Generator().manual_seed(num_tokens)
    q, k, v = (torch.randn(num_tokens, n, d, generator=generator) for n, d in ((4, 8), (2, 8), (2, 6)))
    starts, lens = torch.tensor([0, num_tokens]), torch.tensor([num_tokens])
    indices = lists(lens, starts, num_tokens, topk, ratio, ordered=ordered)
    got = indexed_attention_reference(q, k, v, indices, scale=0.4, ratio=ratio)
    assert_close(got, spelt_out(q, k, v, indices, ratio, 0.4).float())


def test_a_query_that_sees_nothing_is_zero():
    """With ratio 1 there is no tail."""
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    indices = torch.tensor([[-1, -1], [0, -1], [-1, -1]], dtype=torch.int32)
    out = indexed_attention_reference(q, k, k, indices, scale=1.0, ratio=1)
    assert not out[[0, 2]].any() and out[1].any()


def test_the_paged_form_equals_separate_sequences():
    """Prefill, chunk, decode, a request without new tokens, and padding."""
    case = Case(((0, 9), (13, 4), (30, 1), (6, 0)), block_size=4, padding=2)
    inputs, ratio = make_inputs(case), 3
    q, cache, table, lens, starts = inputs.operands[:5]
    indices = lists(lens, starts, len(q), 3, ratio)
    got = paged_indexed_attention_reference(
        q, cache, table, lens, starts, indices, head_dim_v=32, scale=0.2, ratio=ratio
    )
    for r, seq_len in enumerate(lens.tolist()):
        j, mine = torch.arange(seq_len), slice(int(starts[r]), int(starts[r + 1]))
        kv = cache[table[r, j // 4].long(), :, j % 4]
        before = seq_len - (mine.stop - mine.start)
        whole = torch.cat([torch.zeros(before, *q.shape[1:]), q[mine]])
        listed = torch.cat([torch.full((before, 3), -1, dtype=torch.int32), indices[mine]])
        expected = spelt_out(whole, kv[..., :32], kv[..., 32:], listed, ratio, 0.2)[before:]
        assert_close(got[mine], expected.float())
    assert not got[-2:].any()


LENGTHS = {
    "decode": ((600, 1), (30, 1), (0, 1)),
    "mixed": ((600, 1), (20, 50), (330, 2), (9, 0), (0, 1)),
    "prompts": ((0, 70), (0, 9)),
}


def check(provider, case, topk=5, ratio=4, ordered=True):  # noqa: F811
    inputs = make_inputs(case)
    q, cache, table, lens, starts = inputs.operands[:5]
    indices = lists(lens, starts, len(q), topk, ratio, case.seed, ordered)
    options = {name: inputs.options[name] for name in ("head_dim_v", "scale")} | {"ratio": ratio}
    out = provider.overload("paged_indexed_attention")(q, cache, table, lens, starts, indices, **options)
    expected = paged_indexed_attention_reference(
        q.float(), cache.float(), table, lens, starts, indices, **options
    )
    assert out.dtype == case.dtype and out.is_contiguous()
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(2, 1), (1, 3), (1, 35)])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_kernel_is_the_reference(provider, name, num_kv_heads, group, dtype):  # noqa: F811
    check(provider, Case(LENGTHS[name], dtype, num_kv_heads=num_kv_heads, group=group, padding=2))


def test_float16(provider):  # noqa: F811
    check(provider, Case(LENGTHS["mixed"], torch.float16, padding=2))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("block_size", "ratio", "topk"), [(16, 16, 3), (8, 32, 2), (12, 8, 4), (5, 3, 6), (16, 1, 40)]
)
def test_groups_and_blocks_of_any_size(provider, block_size, ratio, topk, strided):  # noqa: F811
    case = Case(LENGTHS["mixed"], block_size=block_size, strided=strided, padding=1)
    check(provider, case, topk, ratio)


def test_lists_in_any_order_with_what_is_not_seen(provider):  # noqa: F811
    check(provider, Case(LENGTHS["mixed"], padding=3), ordered=False)


def test_requests_that_list_all_they_see(provider):  # noqa: F811
    """Plain causal attention, beside requests that do not."""
    check(provider, Case(((3, 20), (300, 1), (0, 17), (9, 0), (0, 4))), topk=8)


@settings(relaxed, max_examples=60)
@given(case=cases(), ratio=st.integers(1, 9), topk=st.integers(1, 9), ordered=st.booleans())
def test_the_kernel_in_random_cases(provider, case, ratio, topk, ordered):  # noqa: F811
    check(provider, dataclasses.replace(case, sinks="none", alibi=False), topk, ratio, ordered)


def test_no_requests(provider):  # noqa: F811
    q, cache, table, *_ = make_inputs(Case(((3, 2),))).operands
    empty = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    indices = torch.full((len(q), 2), -1, dtype=torch.int32)
    kernel = provider.overload("paged_indexed_attention")
    assert not kernel(q, cache, table[:0], *empty, indices, head_dim_v=32, scale=1.0, ratio=4).any()


def test_operands_that_do_not_fit_are_refused(provider):  # noqa: F811
    q, cache, table, lens, starts = make_inputs(Case(((30, 2),))).operands[:5]
    kernel, indices = (
        provider.overload("paged_indexed_attention"),
        torch.zeros((len(q), 2), dtype=torch.int32),
    )
    options = {"head_dim_v": 32, "scale": 1.0, "ratio": 4}
    for bad in (indices[:-1], indices.long(), indices[0]):
        with pytest.raises(ValueError, match="indices must be int32"):
            kernel(q, cache, table, lens, starts, bad, **options)
    with pytest.raises(ValueError, match="ratio must be positive"):
        kernel(q, cache, table, lens, starts, indices, **{**options, "ratio": 0})
    with pytest.raises(ValueError, match="a kv_cache row"):
        kernel(q, cache, table, lens, starts, indices, **{**options, "head_dim_v": 31})


def test_a_block_that_is_none_is_refused(provider):  # noqa: F811
    q, cache, table, lens, starts = make_inputs(Case(((100, 1),))).operands[:5]
    table[0, 2] = len(cache)
    indices = torch.tensor([[8, 9]], dtype=torch.int32)  # tokens 32 ... 39, in the third block
    for kernel in (paged_indexed_attention_reference, provider.overload("paged_indexed_attention")):
        with pytest.raises((ValueError, RuntimeError), match="block id"):
            kernel(q, cache, table, lens, starts, indices, head_dim_v=32, scale=1.0, ratio=4)
