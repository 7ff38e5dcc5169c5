"""Attention in parts in Triton: the cases of the other providers, in each form that a launch can take."""

import pytest
import torch

from tests.custom_ops.paged_cases import Case
from tests.custom_ops.test_unified_attention import (  # noqa: F401  (run here with the provider of this folder)
    BAD,
    GROUPS,
    changed,
    check,
    in_dtype,
    make_shared,
    test_bad_phases_raise,
    test_example_by_hand,
    test_merge_of_empty_parts,
    unified,
)
from tests.custom_ops.triton.on_device import DEVICE
from tests.custom_ops.triton.test_paged_attention import assert_close
from tests.custom_ops.unified_cases import SharedCase

# Shared keys in two splits; sharers of two groups in one tile; more heads than a tile; prompts and decodes.
FORMS = {
    "splits": SharedCase(
        Case(((700, 1), (690, 1), (20, 1)), num_kv_heads=1, sinks="finite"), (0, 0, -1), (672,)
    ),
    "groups": SharedCase(
        Case(((20, 1), (19, 2), (33, 1), (5, 3), (35, 1)), num_kv_heads=1, padding=1, sinks="some -inf"),
        groups=(0, 0, 1, -1, 1),
        shared=(16, 32),
    ),
    "many heads": SharedCase(Case(((6, 1), (5, 2)), num_kv_heads=1, group=35, block_size=4), (0, 0), (4,)),
    "window": SharedCase(
        Case(((40, 2), (20, 9), (45, 1)), num_kv_heads=1, alibi=True, options={"window": 35}),
        (0, -1, 0),
        (32,),
    ),
    "width 512": SharedCase(
        Case(((40, 1), (36, 3)), num_kv_heads=1, head_dim=512, head_dim_v=512), (0, 0), (32,)
    ),
    "soft cap": SharedCase(
        Case(((18, 6), (20, 3)), num_kv_heads=1, head_dim=80, head_dim_v=40, options={"soft_cap": 3.0}),
        (0, 0),
        (18,),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form(unified, name):  # noqa: F811
    check(unified, FORMS[name], "csu" if name in ("window", "soft cap") else "-su", assert_close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensor_core_types(unified, dtype):  # noqa: F811
    check(unified, in_dtype(FORMS["soft cap"], dtype), "csu", assert_close)


def test_parts(provider):
    """Merged, they are the whole: which holds only if each has the LSE of its keys."""
    inputs, _ = make_shared(FORMS["soft cap"])
    options = {**inputs.options, "phases": "csu"}
    part_of, merge = provider.overload("attention_part"), provider.overload("merge_attention_states")
    states = [part_of(*inputs.operands, **options, part=part) for part in "csu"]
    whole = provider.overload("unified_attention")(*inputs.operands, **options)
    torch.testing.assert_close(merge(*map(list, zip(*states)))[0], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "message", ["shared_lens must be", "k is", "need this step's k and v", "shared_leaders"]
)
def test_bad_shapes_and_dtypes_raise(unified, message):  # noqa: F811
    operands, options = changed(*BAD[message])
    with pytest.raises((ValueError, RuntimeError), match=message):
        unified(*operands, **options, phases="csu")


def test_leaders_and_tokens_that_are_not_there_are_not_read(unified):  # noqa: F811
    inputs, _ = make_shared(FORMS["window"])
    operands = list(inputs.operands)
    operands[6] = torch.full_like(operands[6], 1 << 30)
    assert unified(*operands, **inputs.options, phases="-su").isfinite().all()
    operands[7] = torch.full_like(operands[7], 1 << 30)
    assert unified(*operands, **inputs.options, phases="-su").isfinite().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
def test_a_captured_call_serves_other_groups(provider):
    inputs, _ = make_shared(in_dtype(GROUPS, torch.bfloat16))
    provider.overload("unified_attention")
    operands = [None if x is None else x.to(DEVICE) for x in inputs.operands]
    attention, options = torch.ops.pagebinder_triton.unified_attention, {**inputs.options, "phases": "-su"}
    attention(*operands, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*operands, **options)
    operands[5].zero_(), operands[7].fill_(-1)
    graph.replay()
    assert torch.equal(out, attention(*operands, **options))
