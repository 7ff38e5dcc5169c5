"""Attention to latent rows in Triton: the cases of the other providers, over each form that a launch can take."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings

from pagebinder.custom_ops.triton import sparse_mla
from tests.custom_ops.sparse_cases import LAYOUTS, Case, attention_inputs, cases, int32
from tests.custom_ops.test_sparse_mla import (  # noqa: F401  (run here with the provider of this folder)
    BAD_OPERANDS,
    expected_of,
    faults,
    relaxed,
    test_a_query_that_sees_nothing_is_zero,
    test_empty_requests,
    test_padding_is_zero,
)
from tests.custom_ops.triton.on_device import DEVICE, OF_A_KERNEL
from tests.custom_ops.triton.test_paged_attention import assert_close
from tests.helpers import nightly

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHORT = ((37, 1), (0, 3), (12, 0), (140, 2))
# Both caches and a list, all entries, each kind alone; one token, whose rows are split; sizes that are no multiples.
FORMS = {
    "listed": Case(lengths=SHORT, topk=24, sinks="finite", padding=2),
    "all": Case(lengths=SHORT, sinks="some -inf", heads=20, head_dim_v=37),
    "entries alone": Case(lengths=SHORT, window=0, ratio=1, topk=70, width=80, head_dim_v=64),
    "window alone": Case(lengths=SHORT, window=33, entries=False, rows_per_block=(3, 1), strided=True),
    "split": Case(lengths=((311, 1),), window=100, ratio=2, topk=100, sinks="finite", heads=67),
    "ratio 128": Case(lengths=((511, 1), (125, 4)), ratio=128, strided=True, width=7, heads=1),
}


@pytest.fixture(scope="module")
def attention(provider):
    return provider.overload("sparse_mla_attention")


def check(attention, case: Case) -> None:
    inputs = attention_inputs(case)
    out = inputs.run(attention)
    assert out.dtype == case.dtype and out.is_contiguous()
    assert_close(out, expected_of(inputs))


@pytest.mark.parametrize("name", FORMS)
def test_each_form(attention, name):
    check(attention, FORMS[name])


@pytest.mark.parametrize("width, rope_dim", [(128, 64), (256, 64), (464, 16), (192, 128)])
def test_what_is_rotated_is_a_group_or_a_part(attention, width, rope_dim):
    sizes = {"layout": "fp8_v4", "width": width, "rope_dim": rope_dim, "dtype": torch.bfloat16}
    check(attention, dataclasses.replace(FORMS["listed"], **sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(attention, layout, dtype):
    width, rope_dim = LAYOUTS[layout]
    sizes = {"layout": layout, "width": width, "rope_dim": rope_dim, "dtype": dtype}
    check(attention, dataclasses.replace(FORMS["listed"], **sizes, strided=dtype == torch.float16))


def test_rows_of_bytes_in_other_forms(attention):
    for name, layout, width, rope_dim, head_dim_v in (
        ("split", "fp8_v4", 256, 64, None), ("all", "fp8_v32", 288, 32, 256)
    ):  # fmt: skip
        sizes = {"layout": layout, "width": width, "rope_dim": rope_dim, "head_dim_v": head_dim_v}
        check(attention, dataclasses.replace(FORMS[name], dtype=torch.bfloat16, heads=9, **sizes))


@nightly
def test_every_layout_in_every_form(attention):
    for case, dtype, (layout, (width, rope_dim)) in itertools.product(
        FORMS.values(), DTYPES, LAYOUTS.items()
    ):
        sizes = {"layout": layout, "width": width, "rope_dim": rope_dim, "dtype": dtype, "head_dim_v": None}
        check(attention, dataclasses.replace(case, **sizes))


@nightly
@settings(relaxed, max_examples=60 if DEVICE == "cpu" else 8)  # a GPU compiles a kernel for each
@given(case=cases(max_context=90, max_new=3, max_heads=20))
def test_random_cases(attention, case):
    check(attention, case)


def test_sizes_of_deepseek(attention):
    """Rows of V4, wholly values, and of V3.2, values without what is rotated; more programs than tokens."""
    case = Case(
        lengths=((300, 1),), dtype=torch.bfloat16, layout="fp8_v4", rope_dim=64, heads=64, width=512, window=128,
        topk=64, sinks="finite", rows_per_block=(64, 64),
    )  # fmt: skip
    check(attention, case)
    sizes = {"layout": "fp8_v32", "width": 576, "head_dim_v": 512, "window": 0, "ratio": 1, "heads": 16}
    check(attention, dataclasses.replace(case, **sizes))


def test_many_splits(attention, monkeypatch):
    """Some of them without rows."""
    monkeypatch.setattr(sparse_mla, "PROGRAMS_PER_MULTIPROCESSOR", 999)
    monkeypatch.setattr(sparse_mla, "MIN_ROWS_OF_SPLIT", 16)
    check(attention, dataclasses.replace(FORMS["listed"], lengths=SHORT[-2:], head_dim_v=9))


@pytest.mark.parametrize("fault", faults())
def test_faults_show(attention, fault):
    inputs = attention_inputs(Case(lengths=((60, 1), (30, 1)), topk=12, sinks="finite"))
    with pytest.raises(AssertionError):
        assert_close(faults()[fault](inputs).run(attention), expected_of(inputs))


@pytest.mark.parametrize(
    "message", sorted(set(BAD_OPERANDS) - {"is not valid", "exceeds its block table", "query_start_loc"})
)
def test_bad_shapes_and_dtypes_raise(attention, message):
    """What only the device knows is not checked, see sparse_mla.py."""
    index, change = BAD_OPERANDS[message]
    inputs = attention_inputs(Case(lengths=((20, 5), (3, 1)), topk=4, sinks="finite"))
    with pytest.raises((ValueError, RuntimeError), match=message):
        inputs.replace(index, change(inputs.operands[index])).run(attention)
    with pytest.raises(ValueError, match="no kernel for the layout"):
        inputs.with_options(layout="fp4_index").run(attention)


def test_what_is_out_of_range_is_not_read(attention):
    inputs = attention_inputs(Case(lengths=((40, 3), (3, 1)), topk=9))
    expected = inputs.run(attention)
    q, window, table, entries, entry_table, indices, seq_lens, *rest = inputs.operands
    window, entries = window.nan_to_num(), entries.nan_to_num()
    table[0], entry_table[0, 0], seq_lens[0], indices[0] = 1 << 30, -7, 1 << 30, 1 << 30
    out = attention(q, window, table, entries, entry_table, indices, seq_lens, *rest, **inputs.options)
    assert torch.equal(out[3:], expected[3:]) and out.isfinite().all()


def test_opcheck(provider, attention):
    inputs = attention_inputs(Case(lengths=((9, 1), (3, 1)), topk=3, sinks="finite"))
    operands = [None if x is None else x.nan_to_num().to(DEVICE) for x in inputs.operands]
    op = torch.ops.pagebinder_triton.sparse_mla_attention
    torch.library.opcheck(op, operands, inputs.options, test_utils=OF_A_KERNEL)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
def test_a_captured_call_serves_other_lengths(provider, attention):
    case = dataclasses.replace(FORMS["listed"], dtype=torch.bfloat16)
    inputs = attention_inputs(case)
    operands = [None if x is None else x.nan_to_num().to(DEVICE) for x in inputs.operands]
    op = torch.ops.pagebinder_triton.sparse_mla_attention
    op(*operands, **inputs.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*operands, **inputs.options)
    operands[6].sub_(1).clamp_(min=0), operands[5].add_(int32(1).to(DEVICE))
    graph.replay()
    assert torch.equal(out, op(*operands, **inputs.options))
