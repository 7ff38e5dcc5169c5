"""Prefill whose K and V come by a descriptor of the cache: the same numbers as by addresses, and where it is used."""

import dataclasses
from unittest import mock

import pytest
import torch

from tests.custom_ops.paged_cases import Case
from tests.custom_ops.triton.test_paged_attention import check


@pytest.fixture
def hopper(provider):
    """The interpreter stands for a Hopper; launches with descriptors are counted."""
    from pagebinder.custom_ops.triton import gpu, paged_attention

    made, describe = [], paged_attention.TensorDescriptor

    def counted(*operands):
        made.append(operands)
        return describe(*operands)

    with (
        mock.patch.object(gpu, "CAPABILITY_OF_NO_GPU", gpu.HOPPER),
        mock.patch.object(paged_attention, "TensorDescriptor", counted),
    ):
        yield made


CASES = {
    "prompts": Case(
        ((0, 200), (70, 90), (0, 0), (5, 3)), head_dim=64, head_dim_v=64, block_size=64, group=4, padding=3
    ),
    "sinks, slopes, cap": Case(
        ((0, 150), (90, 40)), head_dim=64, head_dim_v=64, block_size=128, group=3, sinks="some -inf", alibi=True,
        options={"soft_cap": 5.0},
    ),
    "both sides": Case(((0, 140),), head_dim=64, head_dim_v=64, block_size=64, group=2, options={"causal": False}),
    "wide": Case(((130, 70), (0, 20)), head_dim=128, head_dim_v=128, block_size=64, num_kv_heads=1, group=2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_against_the_reference(provider, hopper, name, dtype):
    check(provider.overload("paged_attention_lse"), dataclasses.replace(CASES[name], dtype=dtype))
    assert len(hopper) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 48},
        {"dtype": torch.float32},
        {"head_dim": 80, "head_dim_v": 80},
        {"head_dim_v": 32},
        {"strided": True},
        {"options": {"window": 40}},
        {"lengths": ((60, 1), (9, 1))},
    ],
    ids=str,
)
def test_other_caches_are_read_by_addresses(provider, hopper, changes):
    case = dataclasses.replace(CASES["wide"], dtype=torch.bfloat16)
    check(provider.overload("paged_attention_lse"), dataclasses.replace(case, **changes))
    assert not hopper
