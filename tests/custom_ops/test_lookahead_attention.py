"""Causal attention in which some queries see on: the reference against masks spelt out, the paged form, kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.custom_ops.attention.lookahead import (
    lookahead_attention_reference,
    paged_lookahead_attention_reference,
)
from pagebinder.custom_ops.attention.semantic import attention_reference
from tests.custom_ops.paged_cases import Case, cases, make_inputs, sees
from tests.custom_ops.test_paged_attention import provider, relaxed  # noqa: F401  (a fixture)
from tests.tolerances import assert_close

HEADS, KV_HEADS, D, DV = 4, 2, 8, 6
FORMS = {
    "plain": {},
    "with a window": {"window": 4},
    "with all else": {"window": 9, "soft_cap": 2.0, "sinks": True},
}


def some_sinks(form, num_heads):
    return torch.linspace(-2, 2, num_heads) if form.get("sinks") else None


def options_of(form):
    return {name: value for name, value in form.items() if name != "sinks"}


def images(counts, seed, longest=40):
    """Lookahead of requests with so many new tokens each: about half of them in images, which see each other."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for count in counts:
        of_request = torch.zeros(count, dtype=torch.int32)
        place = 0
        while place < count:
            place += int(torch.randint(0, longest, (), generator=generator))
            size = min(int(torch.randint(1, longest + 1, (), generator=generator)), count - place)
            if size > 0:
                of_request[place : place + size] = torch.arange(size - 1, -1, -1)
            place += max(size, 0)
        rows.append(of_request)
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int32)


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_sees_what_a_mask_spelt_out_says(form):
    form, generator = FORMS[form], torch.Generator().manual_seed(3)
    q, k = (torch.randn(13, heads, D, generator=generator) for heads in (HEADS, KV_HEADS))
    v = torch.randn(13, KV_HEADS, DV, generator=generator)
    lookahead, sinks = (
        torch.tensor([0, 0, 4, 3, 2, 1, 0, 0, 2, 1, 0, 5, 0], dtype=torch.int32),
        some_sinks(form, HEADS),
    )
    out = lookahead_attention_reference(q, k, v, lookahead, sinks, scale=0.4, **options_of(form))
    for p in range(13):
        seen = [
            j for j in range(13) if sees(p, j, window=form.get("window")) or p < j <= p + int(lookahead[p])
        ]
        for h in range(HEADS):
            scores = (k[seen, h // 2] @ q[p, h] * 0.4).double()
            if "soft_cap" in form:
                scores = form["soft_cap"] * torch.tanh(scores / form["soft_cap"])
            scores = scores if sinks is None else torch.cat([scores, sinks[h : h + 1].double()])
            weights = torch.softmax(scores, 0)[: len(seen)]
            torch.testing.assert_close(
                out[p, h], (weights @ v[seen, h // 2].double()).float(), atol=1e-5, rtol=1e-5
            )


def test_without_lookahead_it_is_attention():
    q, k, v = (torch.randn(9, heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    nothing = torch.zeros(9, dtype=torch.int32)
    expected = attention_reference(q, k, v, scale=0.3, window=4)
    torch.testing.assert_close(lookahead_attention_reference(q, k, v, nothing, scale=0.3, window=4), expected)


def check_paged(provider, case, form, seed=0):  # noqa: F811
    inputs = make_inputs(case)
    q, cache, *step = inputs.operands[:5]
    lookahead = images([new for _, new in case.lengths], seed)
    lookahead = torch.cat([lookahead, torch.zeros(case.padding, dtype=torch.int32)])
    sinks = some_sinks(form, q.shape[1])
    options = {**options_of(form), **{name: inputs.options[name] for name in ("head_dim_v", "scale")}}
    out = provider.overload("paged_lookahead_attention")(q, cache, *step, lookahead, sinks, **options)
    expected = paged_lookahead_attention_reference(
        q.float(), cache.float(), *step, lookahead, sinks, **options
    )
    assert out.dtype == case.dtype and out.is_contiguous()
    assert_close(out, expected)


# Decodes, whole prompts with images, few new tokens that see each other, and parts behind a cached prefix.
LENGTHS = {
    "decode": ((600, 1), (30, 1), (0, 1)),
    "mixed": ((600, 1), (20, 50), (530, 2), (9, 0), (0, 1), (700, 6)),
    "prompts": ((0, 140), (0, 9)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(2, 1), (1, 3)])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_paged_kernel_is_the_reference(provider, name, num_kv_heads, group, form, dtype):  # noqa: F811
    case = Case(LENGTHS[name], dtype, num_kv_heads=num_kv_heads, group=group, padding=2)
    check_paged(provider, case, FORMS[form])


@settings(relaxed, max_examples=60)
@given(case=cases(), form=st.sampled_from(list(FORMS)), window=st.integers(1, 40), seed=st.integers(0, 99))
def test_the_paged_kernel_in_random_cases(provider, case, form, window, seed):  # noqa: F811
    form = {**FORMS[form], **({"window": window} if "window" in FORMS[form] else {})}
    check_paged(provider, case, form, seed)


def test_a_lookahead_that_does_not_fit_is_refused(provider):  # noqa: F811
    q, *step = make_inputs(Case(((3, 2),))).operands[:5]
    kernel = provider.overload("paged_lookahead_attention")
    for bad in (
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(2, 1).int(),
    ):
        with pytest.raises((ValueError, RuntimeError), match="lookahead must be int32"):
            kernel(q, *step, bad, head_dim_v=32, scale=1.0)


def test_opcheck():
    q, k, v = (torch.randn(5, heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    lookahead = torch.tensor([0, 2, 1, 0, 0], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.pagebinder.lookahead_attention.default, (q, k, v, lookahead), {"scale": 0.3}
    )
    inputs = make_inputs(Case(((9, 4), (3, 1))))
    operands = [*(x.nan_to_num() for x in inputs.operands[:5]), lookahead]
    torch.library.opcheck(torch.ops.pagebinder.paged_lookahead_attention.default, operands, inputs.options)
