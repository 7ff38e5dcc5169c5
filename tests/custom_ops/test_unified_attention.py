"""Attention in parts: reference and providers against one softmax over all keys, parts alone, and their merge."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings

from pagebinder.custom_ops.attention.merge_states import merge_attention_states_reference
from pagebinder.custom_ops.attention.paged import paged_attention_lse_reference
from pagebinder.custom_ops.attention.unified import (
    attention_part_reference,
    unified_attention_reference,
)
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.custom_ops.paged_cases import Case
from tests.custom_ops.test_paged_attention import DTYPES, relaxed
from tests.custom_ops.unified_cases import BY_HAND, SharedCase, make_shared, shared_cases
from tests.tolerances import assert_close, assert_lse_close

PHASES = ("--u", "-su", "c-u", "csu")
# Sharers in two groups and one request beside them, decodes and extends, out of order in the batch.
GROUPS = SharedCase(
    Case(
        ((70, 1), (65, 3), (300, 1), (70, 2), (9, 5), (66, 0), (310, 1)),
        group=3,
        padding=2,
        sinks="some -inf",
    ),
    groups=(0, 0, 1, 0, -1, 0, 1),
    shared=(64, 257),
)
MANY = SharedCase(Case(tuple((2600 + i, 1) for i in range(9)), group=2, num_kv_heads=1), (0,) * 9, (2560,))


@pytest.fixture(scope="module", params=["reference", "cpu"])
def provider(request):
    chosen = registered_providers()[request.param]
    if isinstance(getattr(chosen, "problem", lambda: None)(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    for op in ("unified_attention", "attention_part", "merge_attention_states"):
        chosen.prepare(op)
    return chosen


@pytest.fixture(scope="module")
def unified(provider):
    return provider.overload("unified_attention")


def in_dtype(case: SharedCase, dtype: torch.dtype, **changes) -> SharedCase:
    return dataclasses.replace(case, batch=dataclasses.replace(case.batch, dtype=dtype, **changes))


def check(unified, case: SharedCase, phases: str, close=assert_close) -> torch.Tensor:
    inputs, paged = make_shared(case)
    out = unified(*inputs.operands, **inputs.options, phases=phases)
    expected, _ = paged.float32().run(paged_attention_lse_reference)
    assert out.dtype == case.batch.dtype and out.is_contiguous()
    close(out, expected)
    return out


@settings(relaxed, max_examples=6)
@given(case=shared_cases(max_context=30, max_new=5, max_requests=4))
def test_reference_is_one_softmax(case):
    case = in_dtype(case, torch.float32, group=min(case.batch.group, 3))
    for phases in PHASES:
        check(unified_attention_reference, case, phases)


@settings(relaxed, max_examples=15)
@given(case=shared_cases(max_context=120, max_new=12, max_requests=5))
def test_kernels_are_one_softmax(case):
    chosen = registered_providers()["cpu"]
    chosen.prepare("unified_attention")
    for phases in PHASES:
        check(chosen.overload("unified_attention"), case, phases)


@pytest.mark.parametrize("phases", PHASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups(unified, phases, dtype):
    check(unified, in_dtype(GROUPS, dtype), phases)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 40])
def test_long_prefix_of_many_requests(unified, dtype, head_dim):
    check(unified, in_dtype(MANY, dtype, head_dim=head_dim, head_dim_v=head_dim), "-su")


@pytest.mark.parametrize(
    "changes", [{"alibi": True}, {"options": {"window": 100}}, {"options": {"soft_cap": 3.0}}]
)
def test_options(unified, changes):
    check(unified, in_dtype(GROUPS, torch.float32, **changes), "csu")
    check(unified, in_dtype(MANY, torch.float32, **changes), "-su")


@pytest.mark.parametrize("phases", PHASES)
def test_example_by_hand(unified, phases):
    check(unified, SharedCase(BY_HAND, (-1, 0, 0, 0), (4,)), phases)


def test_phases_without_a_unique_part(unified):
    """Whole prompts need no cache; a cached prompt that is extended by all its sharers has nothing of its own."""
    check(unified, SharedCase(Case(((0, 8), (0, 3)))), "c--")
    check(unified, SharedCase(Case(((16, 5), (16, 1))), (0, 0), (16,)), "cs-")
    inputs, _ = make_shared(SharedCase(Case(((16, 5), (20, 1))), (0, 0), (16,)))
    for phases in ("cs-", "c--", "-s-"):
        with pytest.raises((ValueError, RuntimeError), match="leave keys of a request out"):
            unified(*inputs.operands, **inputs.options, phases=phases)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_and_their_merge(provider, dtype):
    """Each part against its reference; merged, they are the whole. The unique part of a sharer may be empty."""
    case = in_dtype(dataclasses.replace(GROUPS, shared=(65, 300)), dtype)
    inputs, paged = make_shared(case)
    part_of, merge = provider.overload("attention_part"), provider.overload("merge_attention_states")
    outs, lses = [], []
    for part in "csu":
        out, lse = part_of(*inputs.operands, **inputs.options, part=part, phases="csu")
        wide = [x.float() if isinstance(x, torch.Tensor) and x.dtype == dtype else x for x in inputs.operands]
        expected, expected_lse = attention_part_reference(*wide, **inputs.options, part=part, phases="csu")
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, expected, rtol=2**-8 if dtype != torch.float32 else 1e-5, atol=2**-7)
        assert_lse_close(lse, expected_lse)
        outs.append(out), lses.append(lse)
    assert (lses[2][:, 1] == float("-inf")).all() and (outs[2][1] == 0).all()
    merged, lse = merge(outs, lses, inputs.operands[8])
    expected, expected_lse = paged.float32().run(paged_attention_lse_reference)
    assert_close(merged.to(dtype), expected)
    assert_lse_close(lse, expected_lse)


def test_merge_of_empty_parts(provider):
    merge = provider.overload("merge_attention_states")
    out, lse = torch.randn(3, 2, 5), torch.randn(2, 3)
    nothing, no_keys = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    for empty in (no_keys, -no_keys):  # some kernels say +inf
        merged, merged_lse = merge([nothing, out], [empty, lse])
        assert_close(merged, out)
        assert_lse_close(merged_lse, lse)
    merged, merged_lse = merge([nothing, nothing], [no_keys, no_keys], torch.zeros(2))
    assert (merged == 0).all() and (merged_lse == float("-inf")).all()
    merged, merged_lse = merge([out, out], [lse + 200, lse - 200], torch.tensor([float("-inf"), 3.0]))
    assert_close(merged[:, 0], out[:, 0])
    assert_close(merged[:, 1], out[:, 1] * torch.sigmoid(lse[1] + 200 - 3.0)[:, None])
    bad = out.clone()
    bad[0, 0] = float("nan")
    assert merge([bad, out], [lse, lse])[0][0, 0].isnan().all()


def test_merge_in_any_order_and_dtype(provider):
    merge = provider.overload("merge_attention_states")
    outs, lses = torch.randn(3, 7, 4, 16), torch.randn(3, 4, 7) * 5
    for order in itertools.permutations(range(3)):
        assert_close(
            merge(list(outs[list(order)]), list(lses[list(order)]))[0], merge(list(outs), list(lses))[0]
        )
    narrow = list(outs.bfloat16())
    assert_close(merge(narrow, list(lses))[0], merge_attention_states_reference(list(outs), list(lses))[0])


def test_without_sharers_the_bits_are_those_of_paged_attention():
    chosen = registered_providers()["cpu"]
    chosen.prepare("paged_attention")
    inputs, paged = make_shared(dataclasses.replace(GROUPS, shared=(0, 0)))
    expected = paged.run(chosen.overload("paged_attention"))
    out = chosen.overload("unified_attention")(*inputs.operands, **inputs.options, phases="-su")
    assert torch.equal(out, expected)


def test_same_bits_with_any_number_of_threads():
    chosen, threads = registered_providers()["cpu"], torch.get_num_threads()
    for case, dtype in itertools.product((GROUPS, MANY), DTYPES):
        inputs, _ = make_shared(in_dtype(case, dtype))
        results = []
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                op = chosen.overload("unified_attention")
                results.append(op(*inputs.operands, **inputs.options, phases="-su"))
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(*results)


def changed(index: int, change):
    """GROUPS with one operand changed."""
    inputs, _ = make_shared(GROUPS)
    operands = list(inputs.operands)
    operands[index] = change(operands[index])
    return operands, inputs.options


def put(**at):
    def change(tensor):
        tensor = tensor.clone()
        for place, value in at.items():
            tensor[int(place[1:])] = value
        return tensor

    return change


BAD = {
    "more tokens than its context": (5, put(_0=80)),
    "does not share the same tokens": (6, put(_1=4)),
    "but not its blocks": (2, put(_1=0)),
    "every token": (7, put(_0=3)),
    "shared_lens must be": (5, lambda x: x[:-1]),
    "shared_tokens must be": (7, lambda x: x[:-1]),
    "k is": (10, lambda x: x[:, :1]),
    "need this step's k and v": (11, lambda _: None),
    "shared_leaders": (6, lambda x: x.long()),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_operands_raise(unified, message):
    operands, options = changed(*BAD[message])
    with pytest.raises((ValueError, RuntimeError), match=message):
        unified(*operands, **options, phases="csu")


def test_bad_phases_raise(provider):
    inputs, _ = make_shared(GROUPS)
    for phases in ("", "cs", "uuu", "---", "csx"):
        with pytest.raises((ValueError, RuntimeError), match="use .csu."):
            provider.overload("unified_attention")(*inputs.operands, **inputs.options, phases=phases)
    with pytest.raises((ValueError, RuntimeError), match="none of phases"):
        provider.overload("attention_part")(*inputs.operands, **inputs.options, part="c", phases="-su")


def test_opcheck(provider):
    inputs, _ = make_shared(SharedCase(Case(((20, 2), (17, 1)), sinks="finite"), (0, 0), (16,)))
    operands = [None if x is None else x.nan_to_num() for x in inputs.operands]
    options, some = {**inputs.options, "phases": "csu"}, {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(provider.overload("unified_attention"), operands, options)
    torch.library.opcheck(provider.overload("attention_part"), operands, {**options, "part": "s"}, **some)
    states = ([torch.randn(3, 2, 5)] * 2, [torch.randn(2, 3)] * 2, torch.randn(2))
    torch.library.opcheck(provider.overload("merge_attention_states"), states, **some)
