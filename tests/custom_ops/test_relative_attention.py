"""Attention with a bias by distance: the reference against torch with the bias spelt out, the paged form, kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.custom_ops.attention.packed import packed_relative_attention_reference
from pagebinder.custom_ops.attention.relative import (
    paged_relative_attention_reference,
    relative_attention_reference,
)
from tests.custom_ops.paged_cases import Case, cases, make_inputs, sees
from tests.custom_ops.test_packed_attention import operands
from tests.custom_ops.test_paged_attention import provider, relaxed  # noqa: F401  (a fixture)
from tests.tolerances import assert_close

HEADS, KV_HEADS, D, DV, BLOCK = 4, 2, 8, 6, 4
BEHIND = 5


FORMS = {  # of bias, window, sinks
    "by distance": {},
    "with a window": {"window": 4},
    "with sinks": {"sinks": "heads"},
    "by query": {"by_query": True},
    "by query, all at once": {"by_query": True, "window": 4, "sinks": "tokens"},
}


def rows(num, heads, width, seed):
    return torch.randn(num, heads, width, generator=torch.Generator().manual_seed(seed))


def bias(ahead, num_tokens=None):
    shape = (HEADS, BEHIND + 1 + ahead) if num_tokens is None else (num_tokens, HEADS, BEHIND + 1 + ahead)
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(9))


def some_sinks(kind, num_tokens, heads=HEADS):
    """None, [H], or [T, H] float32."""
    shape = {"heads": (heads,), "tokens": (num_tokens, heads)}.get(kind)
    return None if shape is None else 2 * torch.randn(shape, generator=torch.Generator().manual_seed(8))


def spelt_out(q, k, v, bias, causal, window=None, sinks=None):
    """Scores of every query and key, entry by entry."""
    num_tokens = len(q)
    bias, sinks = (
        bias.expand(num_tokens, *bias.shape[-2:]),
        torch.full((num_tokens, HEADS), -torch.inf) if sinks is None else sinks.expand(num_tokens, -1),
    )
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    out = torch.empty(num_tokens, HEADS, v.shape[2])
    for p in range(num_tokens):
        seen = [j for j in range(num_tokens) if sees(p, j, window=window, causal=causal)]
        columns = [min(max(j - p + BEHIND, 0), bias.shape[2] - 1) for j in seen]
        for h in range(HEADS):
            scores = 0.4 * k[seen, h] @ q[p, h] + bias[p, h, columns]
            weights = torch.cat([scores, sinks[p, h, None]]).softmax(0)[:-1]
            out[p, h] = weights @ v[seen, h]
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("causal", "ahead"), [(True, 0), (False, BEHIND), (False, 2)])
@pytest.mark.parametrize("num_tokens", [1, 4, 13])
def test_the_reference_equals_torch(num_tokens, causal, ahead, form):
    q, k, v = (
        rows(num_tokens, HEADS, D, 0),
        rows(num_tokens, KV_HEADS, D, 1),
        rows(num_tokens, KV_HEADS, DV, 2),
    )
    form, options = FORMS[form], {"window": FORMS[form].get("window")}
    learned_bias = bias(ahead, num_tokens if form.get("by_query") else None)
    sinks = some_sinks(form.get("sinks"), num_tokens)
    got = relative_attention_reference(
        q, k, v, learned_bias, sinks, scale=0.4, num_behind=BEHIND, causal=causal, **options
    )
    assert_close(got, spelt_out(q, k, v, learned_bias, causal, sinks=sinks, **options))


@pytest.mark.parametrize("form", FORMS)
def test_the_paged_form_equals_separate_sequences(form):
    """Prefill, chunk, decode, a row without queries, and padding rows; blocks before the window are gone."""
    seq_lens, query_lens = (9, 17, 14, 6), (9, 4, 1, 0)
    tables = torch.tensor(
        [[3, 1, 2, 0, 0], [4, 9, 8, 7, 6], [10, 5, 12, 11, 0], [13, 14, 0, 0, 0], [0] * 5]
    ).int()
    cache = torch.full((16, KV_HEADS, BLOCK, D + DV), torch.nan)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    q = rows(int(starts[-1]) + 2, HEADS, D, 3)
    form, window = FORMS[form], FORMS[form].get("window")
    learned_bias = bias(0, len(q) if form.get("by_query") else None)
    sinks = some_sinks(form.get("sinks"), len(q))
    expected = torch.zeros(len(q), HEADS, DV)
    for r, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens)):
        k, v = rows(seq_len, KV_HEADS, D, 10 + r), rows(seq_len, KV_HEADS, DV, 20 + r)
        j = torch.arange(seq_len)
        cache[tables[r, j // BLOCK].long(), :, j % BLOCK] = torch.cat([k, v], dim=-1)
        before, mine = seq_len - query_len, slice(starts[r], starts[r + 1])
        whole = torch.cat([rows(before, HEADS, D, 30), q[mine]])
        of_whole = [
            x if x is None or x.dim() == dims else torch.cat([x[:1].expand(before, *x.shape[1:]), x[mine]])
            for x, dims in ((learned_bias, 2), (sinks, 1))
        ]
        expected[mine] = spelt_out(whole, k, v, of_whole[0], True, window, of_whole[1])[before:]
    if window is not None:
        tables[1, 0] = tables[2, 0] = 15  # of NaN
    got = paged_relative_attention_reference(
        q,
        cache,
        tables,
        torch.tensor(seq_lens).int(),
        starts,
        learned_bias,
        sinks,
        head_dim_v=DV,
        scale=0.4,
        num_behind=BEHIND,
        window=window,
    )
    assert_close(got, expected)


def test_a_bias_or_sinks_that_do_not_fit_are_refused():
    q = torch.empty(3, HEADS, D, device="meta")
    op = torch.ops.pagebinder.relative_attention
    for bad, behind in ((torch.empty(2, 6), 5), (torch.empty(HEADS, 6), 6), (torch.empty(HEADS, 2, 6), 1)):
        with pytest.raises(ValueError, match="bias must be"):
            op(q, q, q, bad, scale=1.0, num_behind=behind)
    for bad in (torch.empty(3), torch.empty(2, HEADS), torch.empty(3, HEADS, 1)):
        with pytest.raises(ValueError, match="sinks must be"):
            op(q, q, q, torch.empty(HEADS, 6), bad, scale=1.0, num_behind=5)


# Decodes of one and several heads a KV head, a request without new tokens, chunks, and whole prompts; contexts both
# within and far beyond the distances that have a bias of their own.
LENGTHS = {
    "decode": ((600, 1), (30, 1), (0, 1)),
    "mixed": ((600, 1), (20, 50), (530, 2), (9, 0), (0, 1)),
    "prompts": ((0, 40), (0, 9)),
}


def learned(*shape, dtype=torch.float32):
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)


def check_paged(provider, case, behind=40, ahead=0, causal=True, by_query=False, **form):  # noqa: F811
    inputs = make_inputs(case)
    q, cache, *step = inputs.operands[:5]
    shape = (q.shape[1], behind + 1 + ahead)
    learned_bias = learned(*((len(q), *shape) if by_query else shape), dtype=case.dtype)
    sinks = some_sinks(form.get("sinks"), len(q), q.shape[1])
    options = {name: inputs.options[name] for name in ("head_dim_v", "scale")}
    options |= {"num_behind": behind, "causal": causal, "window": form.get("window")}
    out = provider.overload("paged_relative_attention")(q, cache, *step, learned_bias, sinks, **options)
    expected = paged_relative_attention_reference(
        q.float(), cache.float(), *step, learned_bias, sinks, **options
    )
    assert out.dtype == case.dtype and out.is_contiguous()
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(2, 1), (1, 3), (1, 35)])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_paged_kernel_is_the_reference(provider, name, num_kv_heads, group, dtype):  # noqa: F811
    check_paged(provider, Case(LENGTHS[name], dtype, num_kv_heads=num_kv_heads, group=group, padding=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "by distance"])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_paged_kernel_in_every_form(provider, name, form, dtype):  # noqa: F811
    """Prompts whose bias is widened by several threads, too."""
    check_paged(provider, Case(LENGTHS[name], dtype, group=4, padding=2), **FORMS[form])
    check_paged(provider, Case(((0, 90),), dtype), behind=130, **{**FORMS[form], "window": 70})


@settings(relaxed, max_examples=60)
@given(
    case=cases(),
    behind=st.integers(0, 70),
    ahead=st.integers(0, 9),
    causal=st.booleans(),
    by_query=st.booleans(),
    window=st.none() | st.integers(1, 40),
    sinks=st.sampled_from([None, "heads", "tokens"]),
)
def test_the_paged_kernel_in_random_cases(
    provider,  # noqa: F811
    case,
    behind,
    ahead,
    causal,
    by_query,
    window,
    sinks,
):
    check_paged(provider, case, behind, ahead, causal, by_query, window=window, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("causal", "ahead"), [(True, 0), (False, 40), (False, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_the_packed_kernel_is_the_reference(provider, causal, ahead, dtype, form):  # noqa: F811
    q, k, v, starts = operands(dtype)
    form, shape = FORMS[form], (q.shape[1], 41 + ahead)
    learned_bias = learned(*((len(q), *shape) if form.get("by_query") else shape))
    sinks = some_sinks(form.get("sinks"), len(q), q.shape[1])
    options = {"scale": 0.2, "num_behind": 40, "causal": causal, "window": form.get("window")}
    out = provider.overload("packed_relative_attention")(q, k, v, starts, learned_bias, sinks, **options)
    expected = packed_relative_attention_reference(
        q.float(), k.float(), v.float(), starts, learned_bias, sinks, **options
    )
    assert_close(out, expected)


def test_a_kernel_refuses_a_bias_that_does_not_fit(provider):  # noqa: F811
    q, *step = make_inputs(Case(((3, 2),))).operands[:5]
    kernel = provider.overload("paged_relative_attention")
    for bad, behind in (
        (learned(3, 6), 5),
        (learned(4, 6), 6),
        (learned(4, 6), -1),
        (learned(1, 4, 6), 1),
    ):
        with pytest.raises((ValueError, RuntimeError), match="bias must be"):
            kernel(q, *step, bad, head_dim_v=32, scale=1.0, num_behind=behind)


def test_a_kernel_refuses_sinks_that_do_not_fit(provider):  # noqa: F811
    q, *step = make_inputs(Case(((3, 2),))).operands[:5]
    kernel = provider.overload("paged_relative_attention")
    for bad in (torch.zeros(3), torch.zeros(3, 4), torch.zeros(2, 3)):
        with pytest.raises((ValueError, RuntimeError), match="sinks must be"):
            kernel(q, *step, learned(4, 6), bad, head_dim_v=32, scale=1.0, num_behind=5)
