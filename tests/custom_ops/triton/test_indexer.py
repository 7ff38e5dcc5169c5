"""The indexer in Triton: the same entries as the reference, ties included, in each layout and form of a launch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.custom_ops.triton import indexer as kernels
from tests.custom_ops.sparse_cases import INDEX_LAYOUTS, Case, indexer_inputs
from tests.custom_ops.test_indexer import (  # noqa: F401  (run here with the provider of this folder)
    BAD_OPERANDS,
    assert_best,
    check_exact,
    relaxed,
    test_bad_options_raise,
    test_few_entries_are_all_listed,
    test_nan_counts_as_least,
    test_padding_and_empty_requests,
)
from tests.custom_ops.triton.on_device import DEVICE, OF_A_KERNEL
from tests.helpers import nightly

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHORT = ((137, 1), (0, 3), (70, 3), (12, 0))


@pytest.fixture(scope="module")
def indexer(provider):
    return provider.overload("indexer_score_topk")


def of_layout(layout: str, **options) -> Case:
    sizes = {"layout": layout, "width": INDEX_LAYOUTS[layout]}
    return Case(**{"lengths": SHORT, "topk": 16, "heads": 6} | sizes | options)


@pytest.mark.parametrize(
    ("layout", "dtype", "ratio", "heads"),
    [
        ("plain", torch.float32, 1, 70),
        ("plain", torch.bfloat16, 4, 6),
        ("plain", torch.float16, 2, 1),
        ("fp8_index", torch.float32, 2, 6),
    ],
)
def test_exact_scores(indexer, layout, dtype, ratio, heads):
    strided = dtype == torch.float16
    check_exact(indexer, of_layout(layout, dtype=dtype, ratio=ratio, heads=heads, padding=2, strided=strided))


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_random_scores(indexer, layout, dtypes=DTYPES[1:2]):
    """Quantised queries; 96 channels in a tile of 128."""
    for dtype in dtypes:
        case = of_layout(layout, dtype=dtype, ratio=2, width=96, strided=dtype == torch.float32)
        inputs = indexer_inputs(case)
        assert_best(inputs, inputs.run(indexer))


@nightly
@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_every_type(indexer, layout):
    test_random_scores(indexer, layout, DTYPES)
    if layout != "fp4_index":
        for dtype in DTYPES:
            for ratio, heads in ((1, 70), (8, 20)):
                check_exact(indexer, of_layout(layout, dtype=dtype, ratio=ratio, heads=heads, padding=2))


@nightly
@settings(relaxed, max_examples=40 if DEVICE == "cpu" else 8)  # a GPU compiles a kernel for each
@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    width=st.integers(1, 140),
    heads=st.integers(1, 70),
    topk=st.integers(1, 200),
    rows=st.sampled_from([1, 2, 15, 64]),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_sizes(indexer, lengths, dtype, width, heads, topk, rows, strided, seed):
    case = Case(
        lengths=tuple(lengths), dtype=dtype, width=width, heads=heads, topk=topk, ratio=1,
        rows_per_block=(1, rows), strided=strided, seed=seed,
    )  # fmt: skip
    check_exact(indexer, case)


def test_odd_sizes_and_many_entries(indexer):
    case = Case(lengths=((2600, 1),), width=19, heads=3, topk=300, ratio=1, rows_per_block=(1, 15), seed=3)
    check_exact(indexer, case)


def test_scores_in_several_launches(indexer, monkeypatch):
    monkeypatch.setattr(kernels, "SCORE_BYTES", 4 * 3 * 160)
    check_exact(indexer, of_layout("plain", ratio=1, padding=1))


def test_equal_scores_go_to_the_lowest_index(indexer):
    inputs = indexer_inputs(Case(lengths=((200, 1),), topk=100, ratio=1))
    zeros = torch.zeros_like(inputs.operands[1])
    zeros[:, 1::2] = -0.0
    chosen = inputs.replace(1, zeros).run(indexer)
    assert chosen[0].tolist() == list(range(100))


@pytest.mark.parametrize(
    "message", sorted(set(BAD_OPERANDS) - {"is not valid", "exceeds its block table", "query_start_loc"})
)
def test_bad_operands_raise(indexer, message):
    index, change = BAD_OPERANDS[message]
    inputs = indexer_inputs(Case(lengths=((20, 5), (3, 1)), topk=4))
    with pytest.raises((ValueError, RuntimeError), match=message):
        inputs.replace(index, change(inputs.operands[index])).run(indexer)


def test_opcheck(provider, indexer):
    inputs = indexer_inputs(Case(lengths=((40, 1),), topk=4, ratio=2), whole=True)
    operands = [x.nan_to_num().to(DEVICE) for x in inputs.operands]
    op = torch.ops.pagebinder_triton.indexer_score_topk
    torch.library.opcheck(op, operands, inputs.options, test_utils=OF_A_KERNEL)
