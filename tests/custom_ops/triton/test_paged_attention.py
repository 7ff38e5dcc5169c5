"""Paged attention in Triton: the cases of the other providers, sizes small, over each form that a launch can take."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from pagebinder.custom_ops.attention.paged import paged_attention_lse_reference
from pagebinder.custom_ops.attention.quantized_paged import quantized_paged_attention_reference
from tests.custom_ops.paged_cases import Case, cases, make_inputs
from tests.custom_ops.test_paged_attention import (  # noqa: F401  (run here with the provider of this folder)
    BAD_OPERANDS,
    DTYPES,
    _replace,
    relaxed,
    test_empty_and_one_token_requests,
    test_large_scores_stay_finite,
    test_lse_is_without_the_sink,
    test_minus_infinity_sink_changes_nothing,
    test_nan_query_gives_nan,
    test_padding_is_zero,
    test_parts_merge_by_lse,
    test_seq_len_zero_with_a_query_is_zero,
    test_without_lse_is_the_same,
)
from tests.custom_ops.test_quantized_kv import quantised
from tests.custom_ops.triton.on_device import DEVICE
from tests.tolerances import TOLERANCES, Tolerance, assert_lse_close

# The weights of a float16 softmax are rounded for the tensor cores, too: half a unit of 2 times mean |V|, below 2.
WITH_ROUNDED_WEIGHTS = {**TOLERANCES, torch.float16: Tolerance(rtol=2**-11, atol=2**-10)}
# Decoding alone splits the context; chunks of a prompt do not, unless few tokens are new; MHA, GQA, a lone KV head.
FORMS = {
    "decode": Case(((600, 1), (700, 1), (0, 1)), group=4, padding=0, sinks="finite"),
    "short decode": Case(((60, 1), (7, 1)), group=3, sinks="some -inf"),
    "prefill": Case(((0, 40), (0, 9)), group=4, padding=3),
    "mixed": Case(
        ((600, 1), (20, 50), (530, 2), (9, 0), (0, 1)),
        num_kv_heads=1,
        group=3,
        padding=2,
        sinks="finite",
        alibi=True,
    ),
    "long blocks": Case(((300, 1), (70, 40)), block_size=256, group=2),
    "blocks of three": Case(((30, 1), (40, 9)), block_size=3, group=2, strided=True),
    "many heads": Case(((520, 1), (3, 2)), num_kv_heads=1, group=67),
    "window": Case(((560, 1), (300, 20)), group=2, options={"window": 40}),
    "chunk": Case(((560, 1), (300, 20)), group=2, options={"chunk": 32, "soft_cap": 5.0}),
    "both sides": Case(((560, 1), (90, 20)), group=2, alibi=True, options={"causal": False, "window": 33}),
    "width 80": Case(((520, 1), (20, 9)), head_dim=80, head_dim_v=40),
    "width 192": Case(((520, 1), (20, 9)), head_dim=192, head_dim_v=128, num_kv_heads=1),
    "width 256": Case(((520, 1), (20, 9)), head_dim=256, head_dim_v=256, num_kv_heads=1),
    "width 512": Case(((520, 1), (20, 9)), head_dim=512, head_dim_v=512, num_kv_heads=1),
    "width 576": Case(((520, 1), (20, 3)), head_dim=576, head_dim_v=576, num_kv_heads=1, group=2),
    "pairs": Case(
        ((300, 1), (63, 1), (0, 1)),
        head_dim=64,
        head_dim_v=32,
        block_size=64,
        group=3,
        sinks="finite",
        alibi=True,
    ),
    "pairs in a window": Case(((560, 1), (300, 1)), block_size=64, group=9, options={"window": 40}),
    "pairs in chunks": Case(((560, 1), (300, 2)), block_size=32, options={"chunk": 48, "soft_cap": 5.0}),
    "pairs of both sides": Case(((130, 1), (90, 1)), block_size=24, options={"causal": False, "window": 33}),
    "width 7": Case(((520, 1), (20, 9)), head_dim=7, head_dim_v=3),
}


@pytest.fixture(scope="module")
def attention(provider):
    """(out, lse) = attention(operands...)"""
    return provider.overload("paged_attention_lse")


def assert_close(actual, expected):
    tolerance = WITH_ROUNDED_WEIGHTS[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance.rtol, atol=tolerance.atol)


def check(attention, case):
    inputs = make_inputs(case)
    out, lse = inputs.run(attention)
    expected, expected_lse = inputs.float32().run(paged_attention_lse_reference)
    assert out.dtype == case.dtype and out.is_contiguous()
    assert_close(out, expected)
    assert_lse_close(lse, expected_lse)


@pytest.mark.parametrize("name", FORMS)
def test_each_form(attention, name):
    check(attention, FORMS[name])


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("name", ["decode", "mixed", "width 192", "width 512"])
def test_tensor_core_types(attention, name, dtype):
    check(attention, dataclasses.replace(FORMS[name], dtype=dtype))


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(attention, scale):
    """They turn the largest score into the smallest, or all into one."""
    inputs = make_inputs(FORMS["mixed"])
    inputs.options["scale"] = scale
    out, lse = inputs.run(attention)
    expected, expected_lse = inputs.run(paged_attention_lse_reference)
    assert_close(out, expected)
    assert_lse_close(lse, expected_lse)


@settings(relaxed, max_examples=6)
@given(case=cases(max_context=60, max_new=9, max_requests=3))
def test_random_cases(attention, case):
    check(attention, narrow(case))


def narrow(case: Case) -> Case:
    return dataclasses.replace(case, group=min(case.group, 5))


@pytest.mark.parametrize(
    ("name", "codes", "dtype", "fixed"),
    [
        ("mixed", "fp8_e4m3", torch.bfloat16, False),
        ("blocks of three", "fp8_e4m3", torch.float16, False),
        ("width 80", "fp8_e5m2", torch.float32, True),
        ("blocks of three", "fp8_e5m2", torch.bfloat16, False),
        ("window", "int8", torch.float16, False),
        ("decode", "int8", torch.bfloat16, True),
        ("short decode", "fp8_e4m3", torch.bfloat16, False),
        ("pairs", "fp8_e4m3", torch.bfloat16, False),
        ("pairs", "fp8_e5m2", torch.float16, False),
        ("pairs", "int8", torch.float16, True),
        ("pairs in a window", "fp8_e4m3", torch.float16, False),
        ("pairs in chunks", "int8", torch.bfloat16, False),
        ("pairs of both sides", "fp8_e4m3", torch.bfloat16, True),
        ("width 256", "fp8_e4m3", torch.bfloat16, False),
    ],
)
def test_codes(provider, name, codes, dtype, fixed):
    """Strided rows ("blocks of three") begin at any byte, so their scales are not aligned."""
    inputs = quantised(dataclasses.replace(FORMS[name], dtype=dtype), codes, fixed)
    q, *rest = inputs.operands
    out = inputs.run(provider.overload("quantized_paged_attention"))
    expected = quantized_paged_attention_reference(q.float(), *rest, **inputs.options)
    assert out.dtype == dtype and out.is_contiguous()
    assert_close(out, expected)


@pytest.mark.parametrize("codes", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_queries_that_no_float16_holds(provider, size, codes):
    """With a channel that is 10^4 times the others, where they say something; operands of products are float16."""
    inputs = quantised(dataclasses.replace(FORMS["pairs"], dtype=torch.bfloat16, alibi=False), codes, False)
    q, *rest = inputs.operands
    q = q * size
    if size <= 1:
        q[..., 5] *= 1e4
    options = {**inputs.options, "scale": 0.02 / size if size < 1 else 0.02}
    out = provider.overload("quantized_paged_attention")(q, *rest, **options)
    assert_close(out, quantized_paged_attention_reference(q.float(), *rest, **options))


@pytest.mark.parametrize("scale", [1e-7, 300.0])
def test_row_scales_that_no_float16_holds(provider, scale):
    inputs = quantised(Case(((40, 3),), torch.bfloat16), "int8", False)
    q, rows, *rest = inputs.operands
    rows[..., -4:] = torch.tensor([scale]).view(torch.uint8)
    out = provider.overload("quantized_paged_attention")(q.half(), rows, *rest, **inputs.options)
    expected = quantized_paged_attention_reference(q.half().float(), rows, *rest, **inputs.options)
    relative = (out.double() - expected).abs().max() / expected.abs().max()
    assert out.isfinite().all() and relative < 2e-3 + 3e-8 / expected.abs().max()


@pytest.mark.parametrize(
    "message", sorted(set(BAD_OPERANDS) - {"block id", "exceeds its block table", "query_start_loc"})
)
def test_bad_shapes_and_dtypes_raise(provider, message):
    """What only the device knows is not checked, see paged_attention.py."""
    index, change = BAD_OPERANDS[message]
    inputs = make_inputs(Case(((20, 5), (3, 1))))
    with pytest.raises((ValueError, RuntimeError), match=message):
        op = provider.overload("paged_attention")
        op(*_replace(inputs, index, change(inputs.operands[index])), **inputs.options)


def test_blocks_outside_the_cache_and_lengths_beyond_the_table_are_not_read(attention):
    inputs = make_inputs(Case(((40, 3), (3, 1))))
    q, cache, table, seq_lens, *rest = inputs.operands
    expected = inputs.run(attention)[0]
    table[0, 1], seq_lens[0] = 1 << 30, 1 << 30
    out = attention(q, cache, table, seq_lens, *rest, **inputs.options)[0]
    assert torch.equal(out[3:], expected[3:])


def test_opcheck(provider):
    provider.overload("paged_attention")
    inputs = make_inputs(Case(((9, 4), (3, 1)), sinks="finite", alibi=True, options={"window": 6}))
    operands = [None if x is None else x.nan_to_num().to(DEVICE) for x in inputs.operands]
    for op in ("paged_attention", "paged_attention_lse"):
        torch.library.opcheck(getattr(torch.ops.pagebinder_triton, op), operands, inputs.options)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_a_captured_call_serves_other_lengths(provider, name):
    provider.overload("paged_attention")
    case = dataclasses.replace(FORMS[name], dtype=torch.bfloat16, group=4)
    inputs = make_inputs(case)
    operands = [None if x is None else x.to(DEVICE) for x in inputs.operands]
    attention = torch.ops.pagebinder_triton.paged_attention
    attention(*operands, **inputs.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*operands, **inputs.options)
    operands[3].sub_(5).clamp_(min=0)
    graph.replay()
    assert torch.equal(out, attention(*operands, **inputs.options))
