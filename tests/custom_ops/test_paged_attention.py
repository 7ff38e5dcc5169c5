"""Paged attention: the reference against a dense oracle, and every provider against the reference."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from pagebinder.custom_ops.attention.paged import paged_attention_lse_reference
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.custom_ops.paged_cases import Case, Inputs, cases, dense_attention, make_inputs
from tests.tolerances import assert_close, assert_lse_close

PROVIDERS = ["cpu"]  # the triton provider has tests of its own, over cases that its interpreter can do
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", params=PROVIDERS)
def provider(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    assert chosen.reasons_against(OpNeed(op="paged_attention_lse", features=frozenset({"lse"}))) == []
    chosen.prepare()
    return chosen


@pytest.fixture(scope="module")
def attention(provider):
    """(out, lse) = attention(operands...)"""
    return provider.overload("paged_attention_lse")


def check(attention, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = make_inputs(case)
    out, lse = inputs.run(attention)
    expected, expected_lse = inputs.float32().run(paged_attention_lse_reference)
    assert out.dtype == case.dtype and out.is_contiguous()
    assert_close(out, expected)
    assert_lse_close(lse, expected_lse)
    return out, lse


@settings(relaxed, max_examples=60)
@given(cases(max_context=20, max_new=6, max_requests=3))
def test_reference_against_dense(case):
    case = dataclasses.replace(case, dtype=torch.float32, num_kv_heads=1, group=min(case.group, 3))
    inputs = make_inputs(case)
    out, lse = inputs.run(paged_attention_lse_reference)
    expected, expected_lse = dense_attention(inputs)
    assert_close(out, expected)
    assert_lse_close(lse, expected_lse)


@settings(relaxed, max_examples=120)
@given(case=cases())
def test_provider_against_reference(attention, case):
    check(attention, case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("new", [1, 3, 70])
def test_split_kv_long_contexts(attention, dtype, group, new):
    check(
        attention,
        Case(((3000, new), (511, new)), dtype, num_kv_heads=1, group=group, sinks="finite", padding=1),
    )


@pytest.mark.parametrize("options", [{"window": 700}, {"chunk": 900}, {"causal": False}, {"soft_cap": 3.0}])
def test_split_kv_with_masks(attention, options):
    check(attention, Case(((2500, 2), (1023, 1), (1024, 1)), num_kv_heads=1, alibi=True, options=options))


def test_large_scores_stay_finite(attention):
    inputs = make_inputs(Case(((200, 40),), head_dim=64))
    inputs.options["scale"] = 30.0
    out, lse = inputs.run(attention)
    expected, expected_lse = inputs.run(paged_attention_lse_reference)
    assert torch.isfinite(out).all()
    # Scores of a few hundred carry an error of their own magnitude times 2^-24.
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    assert_lse_close(lse, expected_lse)


@pytest.mark.parametrize("lengths", [((0, 0),), ((0, 0), (0, 0)), ((5, 0), (0, 1)), ()])
def test_empty_and_one_token_requests(attention, lengths):
    out, _ = check(attention, Case(lengths))
    assert out.shape[0] == sum(new for _, new in lengths)


def test_seq_len_zero_with_a_query_is_zero(attention):
    inputs = make_inputs(Case(((0, 1), (7, 1))))
    q, cache, table, seq_lens, *rest = inputs.operands
    for causal in (True, False):
        out, lse = attention(
            q,
            cache,
            table,
            seq_lens * torch.tensor([0, 1], dtype=torch.int32),
            *rest,
            **inputs.options,
            causal=causal,
        )
        assert (out[0] == 0).all() and (lse[:, 0] == float("-inf")).all()
        assert (out[1] != 0).any()


def test_padding_is_zero(attention):
    out, lse = check(attention, Case(((4, 3),), padding=4))
    assert (out[3:] == 0).all() and (lse[:, 3:] == float("-inf")).all()


def test_minus_infinity_sink_changes_nothing(attention):
    inputs = make_inputs(Case(((40, 3),)))
    without = inputs.run(attention)[0]
    q, *_ = inputs.operands
    sinks = torch.full((q.shape[1],), float("-inf"))
    assert torch.equal(attention(*inputs.operands[:5], sinks, **inputs.options)[0], without)


def test_lse_is_without_the_sink(attention):
    inputs = make_inputs(Case(((40, 3),), sinks="finite"))
    sinks = inputs.operands[5]
    with_sink, lse = inputs.run(attention)
    without, lse_without = attention(*inputs.operands[:5], **inputs.options)
    assert torch.equal(lse, lse_without)
    assert_close(with_sink, without * torch.sigmoid(lse.T - sinks)[..., None])


def test_parts_merge_by_lse(attention):
    """Bidirectional attention to 48 keys is the merge of attention to the first 16 and to the other 32."""
    inputs = make_inputs(Case(((48, 0),)))
    q = torch.randn(4, 4, 32)
    _, cache, table, *_ = inputs.operands
    starts = torch.tensor([0, 4], dtype=torch.int32)

    def attend(blocks, length):
        seq_lens = torch.tensor([length], dtype=torch.int32)
        return attention(q, cache, blocks, seq_lens, starts, **inputs.options, causal=False)

    whole, whole_lse = attend(table, 48)
    first, first_lse = attend(table[:, :1].contiguous(), 16)
    rest, rest_lse = attend(table[:, 1:], 32)
    weight = torch.sigmoid(first_lse - rest_lse).T[..., None]
    assert_close(whole, first * weight + rest * (1 - weight))
    assert_lse_close(whole_lse, torch.logaddexp(first_lse, rest_lse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_any_batch_and_with_any_number_of_threads(attention, provider, dtype):
    if provider.name != "cpu":
        pytest.skip("promised by the cpu provider only")
    case = Case(((1500, 1), (0, 200), (77, 5), (700, 1)), dtype, group=4)
    inputs = make_inputs(case)
    q, cache, table, seq_lens, starts, *rest = inputs.operands
    threads = torch.get_num_threads()
    together = inputs.run(attention)[0]
    try:
        torch.set_num_threads(1)
        assert torch.equal(inputs.run(attention)[0], together)
    finally:
        torch.set_num_threads(threads)
    for r in range(4):
        part = slice(starts[r], starts[r + 1])
        own_starts = torch.tensor([0, starts[r + 1] - starts[r]], dtype=torch.int32)
        alone = attention(
            q[part], cache, table[r : r + 1], seq_lens[r : r + 1], own_starts, *rest, **inputs.options
        )
        assert torch.equal(alone[0], together[part])


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"window": 7}, {"chunk": 70}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_that_share_their_keys_have_the_bits_of_tiles_alone(attention, dtype, options):
    """With many threads every tile of query rows is a job of its own, with one thread several are one job."""
    case = Case(
        ((40, 300), (3, 130), (0, 33)), dtype, num_kv_heads=4, group=4, block_size=64, options=options
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = check(attention, case)
        torch.set_num_threads(16)
        alone = make_inputs(case).run(attention)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together[0], alone[0]) and torch.equal(together[1], alone[1])


def test_without_lse_is_the_same(provider):
    inputs = make_inputs(Case(((30, 20), (700, 1)), sinks="finite"))
    out = inputs.run(provider.overload("paged_attention"))
    assert torch.equal(out, inputs.run(provider.overload("paged_attention_lse"))[0])


def test_nan_query_gives_nan(attention):
    inputs = make_inputs(Case(((8, 2),)))
    inputs.operands[0][0, 0, 3] = float("nan")
    out = inputs.run(attention)[0]
    assert out[0, 0].isnan().all() and not out[0, 1:].isnan().any() and not out[1].isnan().any()


def _replace(inputs, index, value):
    return (*inputs.operands[:index], value, *inputs.operands[index + 1 :])


BAD_OPERANDS = {
    "query heads": (0, lambda q: q[:, :3]),
    "same dtype": (0, lambda q: q.to(torch.float16)),
    "wide": (0, lambda q: q[..., :31].contiguous()),
    "last stride": (0, lambda q: q.transpose(0, 2).contiguous().transpose(0, 2)),
    "block_table": (2, lambda table: table.long()),
    "block id": (2, lambda table: table + 1000),
    "exceeds its block table": (3, lambda lens: lens + 1000),
    "seq_lens": (3, lambda lens: lens[:-1]),
    "query_start_loc": (4, lambda starts: starts + 50),
    "sinks": (5, lambda _: torch.zeros(3)),
    "alibi_slopes": (6, lambda _: torch.zeros(4, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", ["reference", *PROVIDERS])
@pytest.mark.parametrize("message", BAD_OPERANDS)
def test_bad_operands_raise(name, message):
    chosen = registered_providers()[name]
    chosen.prepare()
    index, change = BAD_OPERANDS[message]
    inputs = make_inputs(Case(((20, 5), (3, 1))))
    with pytest.raises((ValueError, RuntimeError), match=message):
        op = chosen.overload("paged_attention")
        op(*_replace(inputs, index, change(inputs.operands[index])), **inputs.options)


@pytest.mark.parametrize("name", ["reference", *PROVIDERS])
@pytest.mark.parametrize("options", [{"window": 0}, {"chunk": 0}, {"soft_cap": 0.0}])
def test_bad_options_raise(name, options):
    inputs = make_inputs(Case(((20, 5),)))
    chosen = registered_providers()[name]
    chosen.prepare()
    with pytest.raises((ValueError, RuntimeError), match=next(iter(options))):
        chosen.overload("paged_attention")(*inputs.operands, **inputs.options, **options)


@pytest.mark.parametrize("name", ["reference", *PROVIDERS])
@pytest.mark.parametrize("op", ["paged_attention", "paged_attention_lse"])
def test_opcheck(name, op):
    chosen = registered_providers()[name]
    chosen.prepare()
    inputs = make_inputs(
        Case(((9, 4), (3, 1)), sinks="finite", alibi=True, options={"window": 6, "soft_cap": 9.0})
    )
    cache = inputs.operands[1].nan_to_num()
    torch.library.opcheck(chosen.overload(op), _replace(inputs, 1, cache), inputs.options)


def one_by_one(attention, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Each new token of each request in a call of its own."""
    q, cache, block_table, seq_lens, starts, *rest = inputs.operands
    outs, lses = [], []
    for r, seq_len in enumerate(seq_lens.tolist()):
        first, end = starts[r : r + 2].tolist()
        for token in range(first, end):
            now = torch.tensor([seq_len - (end - 1 - token)], dtype=torch.int32)
            alone = (
                q[token : token + 1],
                cache,
                block_table[r : r + 1],
                now,
                torch.tensor([0, 1], dtype=torch.int32),
            )
            out, lse = attention(*alone, *rest, **inputs.options)
            outs.append(out)
            lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)


FEW_TOKENS = {
    "short": {"lengths": ((100, 8), (63, 2), (70, 5), (9, 7), (1, 1))},
    "parts": {"lengths": ((1026, 8), (1024, 4), (3001, 7), (2048, 3))},
    "parts of another size": {"lengths": ((32 * 1024 + 3, 7),), "num_kv_heads": 1, "head_dim": 16},
    "window": {"lengths": ((300, 8), (1100, 8), (8, 8)), "options": {"window": 67}},
    "long window": {"lengths": ((2500, 8),), "options": {"window": 1100}},
    "chunk": {"lengths": ((130, 8), (64, 4)), "options": {"chunk": 64}},
    "soft cap": {"lengths": ((200, 8),), "options": {"soft_cap": 5.0}},
    "sinks": {"lengths": ((200, 8), (1030, 6)), "sinks": "finite"},
    "alibi": {"lengths": ((200, 8),), "alibi": True},
    "odd width": {"lengths": ((90, 6),), "head_dim": 40},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", FEW_TOKENS)
def test_few_tokens_have_the_bits_of_one_by_one(attention, name, group, dtype):
    """Guessed tokens are checked together and must be what they would have been alone, to the bit."""
    inputs = make_inputs(Case(**{"dtype": dtype, "group": group, **FEW_TOKENS[name]}))
    together, alone = inputs.run(attention), one_by_one(attention, inputs)
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])
