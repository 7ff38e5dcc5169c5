"""`packed_attention`: the kernel against the reference, and the reference against each sequence by itself."""

from __future__ import annotations

import pytest
import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.custom_ops.attention.packed import packed_attention_reference
from pagebinder.custom_ops.attention.semantic import attention_reference
from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.providers import OpNeed, select_provider
from tests.tolerances import assert_close

LENGTHS = (3, 70, 1, 0, 130)
PADDING = 2
OPTIONS = {
    "bidirectional": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": False, "window": 5},
    "soft cap": {"causal": False, "soft_cap": 2.0},
    "chunk": {"causal": True, "chunk": 16},
}


def operands(dtype=torch.float32, heads=(4, 2), widths=(24, 16)):
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS) + PADDING
    shapes = (
        (num_tokens, heads[0], widths[0]),
        (num_tokens, heads[1], widths[0]),
        (num_tokens, heads[1], widths[1]),
    )
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    starts = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return q, k, v, starts


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_reference_is_attention_of_each_sequence(options):
    q, k, v, starts = operands()
    out = torch.ops.pagebinder.packed_attention(q, k, v, starts, scale=0.2, **options)
    for begin, end in zip(starts.tolist(), starts.tolist()[1:]):
        rows = slice(begin, end)
        assert_close(out[rows], attention_reference(q[rows], k[rows], v[rows], scale=0.2, **options))
    assert not out[-PADDING:].any()


@pytest.mark.skipif(build.problem() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_kernel_is_the_reference(options, dtype):
    kernel = select_provider(OpNeed(op="packed_attention"), "cpu").overload
    q, k, v, starts = operands(dtype)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])
    for optional in ((), (sinks,)):
        expected = packed_attention_reference(
            q.float(), k.float(), v.float(), starts, *optional, scale=0.2, **options
        )
        assert_close(kernel(q, k, v, starts, *optional, scale=0.2, **options), expected)


def test_starts_that_fall_or_leave_the_rows_are_an_error():
    q, k, v, starts = operands()
    for bad in (starts + 1, starts.flip(0), torch.tensor([0, len(q) + 1], dtype=torch.int32)):
        with pytest.raises(ValueError, match="must rise from 0 to at most T"):
            torch.ops.pagebinder.packed_attention(q, k, v, bad, scale=0.2)
