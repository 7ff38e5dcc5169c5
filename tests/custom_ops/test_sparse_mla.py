"""Attention to latent rows: the reference against a dense oracle, every provider against the reference."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.custom_ops.sparse import semantic
from pagebinder.custom_ops.sparse.semantic import compressed_attention_reference
from pagebinder.custom_ops.sparse.sparse_mla import sparse_mla_attention_reference
from pagebinder.errors import CompilerNotFoundError
from tests.custom_ops.sparse_cases import (
    LAYOUTS,
    Case,
    Inputs,
    attention_inputs,
    cases,
    dense_attention,
    int32,
)
from tests.helpers import NIGHTLY
from tests.tolerances import assert_close

PROVIDERS = ["reference", "cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = ((37, 1), (0, 21), (200, 5), (12, 0), (511, 1))
relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", params=PROVIDERS)
def attention(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    assert chosen.reasons_against(OpNeed(op="sparse_mla_attention", dtype="bfloat16")) == []
    chosen.prepare()
    return chosen.overload("sparse_mla_attention")


def expected_of(inputs: Inputs) -> torch.Tensor:
    """The reference in float32, on the rows as they are stored."""
    q, window, window_table, entries, entry_table, *rest = inputs.operands
    wide = [c if c is None or c.dtype == torch.uint8 else c.float() for c in (window, entries)]
    operands = (q.float(), wide[0], window_table, wide[1], entry_table, *rest)
    return Inputs(operands, inputs.options).run(sparse_mla_attention_reference)


def check(attention, case: Case) -> torch.Tensor:
    inputs = attention_inputs(case)
    out = inputs.run(attention)
    assert out.dtype == case.dtype and out.is_contiguous()
    assert_close(out, expected_of(inputs))
    return out


def of_layout(layout: str, **options) -> Case:
    width, rope_dim = LAYOUTS[layout]
    return Case(lengths=MIXED, layout=layout, width=width, rope_dim=rope_dim, **options)


@settings(relaxed, max_examples=40 if NIGHTLY else 15)
@given(cases(max_context=40, max_new=5, max_heads=3))
def test_reference_against_dense(case):
    case = dataclasses.replace(
        case, dtype=torch.float32, heads=min(case.heads, 3), lengths=case.lengths[:2], topk=case.topk and 9
    )
    inputs = attention_inputs(case)
    assert_close(inputs.run(sparse_mla_attention_reference), dense_attention(inputs))


@settings(relaxed, max_examples=150 if NIGHTLY else 40)
@given(case=cases())
def test_provider_against_reference(attention, case):
    check(attention, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [1, 4, 8, 128])
@pytest.mark.parametrize("topk", [None, 24])
def test_layouts(attention, layout, dtype, ratio, topk):
    check(
        attention, of_layout(layout, dtype=dtype, ratio=ratio, topk=topk, sinks="finite", heads=20, padding=2)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{"window": 0}, {"entries": False}, {"window": 1}, {"window": 10_000}])
def test_one_kind_of_rows(attention, layout, options):
    check(attention, of_layout(layout, dtype=torch.bfloat16, sinks="some -inf", heads=9, **options))


@pytest.mark.parametrize("layout", ["plain", "fp8_v4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("topk", [None, 512])
def test_sizes_of_deepseek_v4(attention, layout, dtype, topk):
    """64 heads of 512, window 128, split keys, and a prefill that shares rows between tokens."""
    rope_dim = 64 if layout == "fp8_v4" else 0
    case = Case(
        lengths=((4095, 1), (2100, 7), (0, 1)), dtype=dtype, layout=layout, rope_dim=rope_dim, heads=64,
        width=512, window=128, topk=topk, sinks="finite", rows_per_block=(64, 64),
    )  # fmt: skip
    check(attention, case)


def test_latent_rows_of_deepseek_v32(attention):
    """128 heads of 576, values 512 wide, no window, the chosen tokens only."""
    case = Case(
        lengths=((700, 2),), dtype=torch.bfloat16, layout="fp8_v32", rope_dim=64, heads=128, width=576,
        head_dim_v=512, window=0, ratio=1, topk=256,
    )  # fmt: skip
    check(attention, case)


@pytest.mark.parametrize("lengths", [((0, 0),), ((5, 0), (0, 1)), ()])
def test_empty_requests(attention, lengths):
    out = check(attention, Case(lengths=lengths, window=4))
    assert len(out) == sum(new for _, new in lengths)


@pytest.mark.parametrize("sinks", ["none", "some -inf", "finite"])
def test_a_query_that_sees_nothing_is_zero(attention, sinks):
    case = Case(lengths=((0, 3), (2, 1), (300, 1)), window=0, ratio=4, sinks=sinks)
    out = check(attention, case)
    assert (out[:4] == 0).all() and (out[4] != 0).any()
    inputs = attention_inputs(Case(lengths=((40, 1),), window=0, topk=3))
    assert (inputs.replace(5, int32([[-1, -1, -1]])).run(attention) == 0).all()


def test_padding_is_zero(attention):
    out = check(attention, Case(lengths=((4, 3),), padding=4, sinks="finite"))
    assert (out[3:] == 0).all()


def test_minus_infinity_sink_changes_nothing(attention):
    inputs = attention_inputs(Case(lengths=MIXED))
    sinks = torch.full((4,), float("-inf"))
    assert torch.equal(inputs.replace(8, sinks).run(attention), inputs.run(attention))


def test_lists_of_all_entries_equal_none(attention):
    inputs = attention_inputs(Case(lengths=((100, 1), (40, 6)), window=8))
    everything = torch.arange(30, dtype=torch.int32).flip(0).repeat(7, 1)
    assert_close(inputs.replace(5, everything).run(attention), inputs.run(attention))


def test_large_scores_stay_finite(attention):
    out = attention_inputs(Case(lengths=((300, 3),))).with_options(scale=30.0).run(attention)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("topk", [None, 6])
@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_paged_equals_semantic(attention, topk, ratio):
    """One sequence of 50 tokens: at once, and the last 13 over a cache."""
    case = Case(lengths=((0, 50),), window=7, ratio=ratio, topk=topk, sinks="finite")
    q, cache, table, entry_cache, entry_table, indices, seq_lens, starts, sinks = attention_inputs(
        case
    ).operands
    kv = cache[table[0, :4].long()].flatten(0, 1)[:50]
    entries = torch.zeros(50, case.width)
    w = torch.arange(50 // ratio)
    entries[ratio - 1 :: ratio] = entry_cache[entry_table[0].long()[w // 8], w % 8]
    options = dict(scale=0.3, window=7, ratio=ratio)
    whole = compressed_attention_reference(q, kv, entries, indices, sinks, **options)
    options |= dict(head_dim_v=case.width)
    caches = (cache, table, entry_cache, entry_table)
    assert_close(attention(q, *caches, indices, seq_lens, starts, sinks, **options), whole)
    last = None if indices is None else indices[37:]
    part = attention(q[37:], *caches, last, seq_lens, int32([0, 13]), sinks, **options)
    assert_close(part, whole[37:])


# ---- a fault must show ---------------------------------------------------------------------------------------------


def faults() -> dict:
    def drop_one(inputs):
        indices = inputs.operands[5].clone()
        indices[:, 0] = -1
        return inputs.replace(5, indices)

    return {
        "window one more": lambda i: i.with_options(window=17),
        "window one less": lambda i: i.with_options(window=15),
        "sink twice": lambda i: i.replace(8, i.operands[8] + torch.log(torch.tensor(2.0))),
        "no sink": lambda i: i.replace(8, None),
        "one entry less": drop_one,
        "no lists": lambda i: i.replace(5, None),
    }


@pytest.mark.parametrize("fault", faults())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_show(attention, fault, dtype):
    inputs = attention_inputs(Case(lengths=((90, 1), (30, 9)), dtype=dtype, topk=12, sinks="finite"))
    with pytest.raises(AssertionError):
        assert_close(faults()[fault](inputs).run(attention), expected_of(inputs))


@pytest.mark.parametrize("shift", [-1, 1])
def test_visibility_off_by_one_shows(attention, monkeypatch, shift):
    """Entry 31 is visible from position 127 on."""
    inputs = attention_inputs(Case(lengths=((124, 7),), window=0))
    out = inputs.run(attention)
    assert_close(out, expected_of(inputs))
    monkeypatch.setattr(semantic, "num_visible", lambda p, ratio: (p + 1 + shift) // ratio)
    with pytest.raises(AssertionError):
        assert_close(out, expected_of(inputs))


# ---- promises of the cpu provider, bad operands --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topk", [None, 300])
def test_same_bits_in_any_batch_and_with_any_number_of_threads(dtype, topk):
    chosen = registered_providers()["cpu"]
    if chosen.problem() is not None:
        pytest.skip(str(chosen.problem()))
    chosen.prepare()
    attention = chosen.overload("sparse_mla_attention")
    case = Case(lengths=((1500, 1), (0, 60), (77, 5), (2700, 1)), dtype=dtype, topk=topk, heads=20, ratio=2)
    inputs = attention_inputs(case)
    together = inputs.run(attention)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(inputs.run(attention), together)
    finally:
        torch.set_num_threads(threads)
    q, window, window_table, entries, entry_table, indices, seq_lens, starts, sinks = inputs.operands
    for r in range(4):
        mine, row = slice(starts[r], starts[r + 1]), slice(r, r + 1)
        lists = None if indices is None else indices[mine]
        own = (q[mine], window, window_table[row], entries, entry_table[row], lists, seq_lens[row])
        alone = Inputs((*own, int32([0, starts[r + 1] - starts[r]]), sinks), inputs.options).run(attention)
        assert torch.equal(alone, together[mine])


BAD_OPERANDS = {
    "same dtype": (1, lambda cache: cache.half()),
    "window_cache must be|a cache row is": (1, lambda cache: cache[..., 1:]),
    "the last stride": (1, lambda cache: cache.transpose(1, 2).contiguous().transpose(1, 2)),
    "go together": (2, lambda table: None),
    "window_table must be int32": (2, lambda table: table.long()),
    "is not valid": (2, lambda table: table + 1000),
    "needs window_cache|go together": (1, lambda cache: None),
    "indices without|go together": (3, lambda cache: None),
    "indices must be int32": (5, lambda indices: indices[:-1]),
    "exceeds its block table": (6, lambda lens: lens + 1000),
    "one entry more": (7, lambda starts: starts[:-1]),
    "query_start_loc": (7, lambda starts: starts + 50),
    "sinks must be": (8, lambda sinks: sinks.double()),
}


@pytest.mark.parametrize("message", BAD_OPERANDS)
def test_bad_operands_raise(attention, message):
    index, change = BAD_OPERANDS[message]
    inputs = attention_inputs(Case(lengths=((20, 5), (3, 1)), topk=4, sinks="finite"))
    with pytest.raises((ValueError, RuntimeError), match=message):
        inputs.replace(index, change(inputs.operands[index])).run(attention)


@pytest.mark.parametrize(
    "options", [{"window": -1}, {"ratio": 0}, {"head_dim_v": 0}, {"head_dim_v": 49}, {"layout": "fp3"}]
)
def test_bad_options_raise(attention, options):
    inputs = attention_inputs(Case(lengths=((20, 5),)))
    with pytest.raises((ValueError, RuntimeError), match=next(iter(options))):
        inputs.with_options(**options).run(attention)


@pytest.mark.parametrize("topk", [None, 5])
def test_opcheck(attention, topk):
    inputs = attention_inputs(Case(lengths=((9, 4), (3, 1)), topk=topk, sinks="finite", ratio=2))
    q, window, window_table, entries, *rest = inputs.operands
    operands = (q, window.nan_to_num(), window_table, entries.nan_to_num(), *rest)
    torch.library.opcheck(attention, operands, inputs.options)
