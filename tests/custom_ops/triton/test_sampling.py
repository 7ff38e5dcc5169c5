"""Sampling in Triton: the tokens of the reference, whatever is asked for and however rows are cut into parts."""

import math

import pytest
import torch

from tests.custom_ops.test_sample_tokens import BAD, OPTIONS, operands, reference
from tests.custom_ops.triton.on_device import DEVICE
from tests.helpers import nightly

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNCHECKED = {
    "a row beyond logits",
    "a token beyond the vocabulary",
    "ends that fall",
}  # the device alone knows


@pytest.fixture(scope="module")
def ops(provider):
    return {op: provider.overload(op) for op in ("argmax_tokens", "sample_tokens")}


def check_equal(ops, vocab, dtype, options, **kwargs):
    case = operands(vocab, dtype, options, **kwargs)
    assert torch.equal(ops["sample_tokens"](*case), reference.sample_tokens(*case))
    assert torch.equal(ops["argmax_tokens"](case[0]), reference.argmax_tokens(case[0]))


@pytest.mark.parametrize("options", OPTIONS)
def test_the_tokens_of_the_reference(ops, options):
    for i, (vocab, draws) in enumerate(((15, 2), (130, 5), (1000, 4))):
        check_equal(ops, vocab, DTYPES[i], options, draws=draws)


@nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_more_of_them(ops, options, dtype):
    for vocab in (1, 1500):
        check_equal(ops, vocab, dtype, options, seed=1, draws=8)


@pytest.fixture
def many_parts(monkeypatch, provider):
    """Rows cut as a GPU would cut longer ones, and chunks shorter than a part."""
    from pagebinder.custom_ops.triton import gpu, sampling

    monkeypatch.setattr(gpu, "MULTIPROCESSORS_OF_NO_GPU", 24)
    monkeypatch.setattr(sampling, "MIN_PART", 200)
    monkeypatch.setattr(sampling, "CHUNK", 128)


@pytest.mark.usefixtures("many_parts")
@pytest.mark.parametrize("options", ["all", *(pytest.param(o, marks=nightly) for o in OPTIONS if o != "all")])
def test_rows_in_parts(ops, options):
    check_equal(ops, 700, torch.bfloat16, options, draws=4)


def test_nan_is_negative_and_infinity_is_largest(ops):
    logits = torch.zeros(4, 60)
    logits[0, 59] = math.nan
    logits[1, 50], logits[1, 7] = math.inf, -math.inf
    logits[2] = -math.inf
    logits[3, 5] = 60.0
    assert ops["argmax_tokens"](logits).tolist() == [-1, 50, 0, 5]
    draws = torch.zeros(4, dtype=torch.int64)
    starts, none, streams = torch.zeros(5, dtype=torch.int64), draws[:0], torch.stack([draws, draws], dim=-1)
    for limits in ((40, 0.9), (math.inf, 1.0)):
        options = torch.tensor([[1.4, *limits, -math.inf, 1.0]] * 4, dtype=torch.float64)
        expected = reference.sample_tokens(logits, torch.arange(4), streams, options, none, starts)
        found = ops["sample_tokens"](logits, torch.arange(4), streams, options, none, starts)
        assert torch.equal(found, expected) and found.tolist()[:3] == [-1, 50, 0]


def test_what_only_the_device_knows_harms_nobody(ops):
    logits, rows, streams, options, seen, starts = operands(64, torch.float32, "penalty", draws=5)
    expected = reference.sample_tokens(logits, rows, streams, options, seen, starts)
    rows[1], rows[3] = 5, -1
    expected[1] = expected[3] = -1
    more = torch.cat([seen, torch.tensor([64, -1, 1 << 40])])
    starts[-1] += 3
    found = ops["sample_tokens"](logits, rows, streams, options, more, starts)
    assert torch.equal(found, expected)
    starts[-1] += 1000
    found = ops["sample_tokens"](logits, rows, streams, options, more, starts)
    assert torch.equal(found, expected)


def test_strided_logits_and_no_draws(ops):
    logits, *rest = operands(130, torch.bfloat16, "min_p", draws=3)
    expected = ops["sample_tokens"](logits, *rest)
    wide = torch.cat([logits, logits], 1)[:, :130]
    assert torch.equal(ops["sample_tokens"](wide, *rest), expected)
    assert torch.equal(ops["sample_tokens"](logits.T.contiguous().T, *rest), expected)
    nothing = [t[:0] for t in rest]
    nothing[-1] = rest[-1][:1]
    assert ops["sample_tokens"](logits, *nothing).shape == (0,)
    assert ops["argmax_tokens"](logits[:0]).shape == (0,)


@pytest.mark.parametrize("case", sorted(set(BAD) - UNCHECKED))
def test_bad_operands_are_refused(ops, case):
    bad = list(operands(64, torch.float32, "all"))
    index, spoil = BAD[case]
    bad[index] = spoil(bad[index])
    with pytest.raises(ValueError):
        ops["sample_tokens"](*bad)


def test_opcheck(provider):
    case = [t.to(DEVICE) for t in operands(64, torch.bfloat16, "penalty", draws=2)]
    utils = ("test_schema", "test_faketensor")
    for op, given in (("sample_tokens", case), ("argmax_tokens", case[:1])):
        provider.overload(op)
        torch.library.opcheck(getattr(torch.ops.pagebinder_triton, op), given, test_utils=utils)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
def test_a_captured_call_draws_from_other_logits(provider):
    provider.overload("sample_tokens")
    case = [t.to(DEVICE) for t in operands(1000, torch.bfloat16, "all")]
    sample = torch.ops.pagebinder_triton.sample_tokens
    sample(*case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(*case)
    case[0].copy_(torch.randn_like(case[0]))
    graph.replay()
    assert torch.equal(tokens, sample(*case))
