"""Latent rows in Triton: written, and read by the absorbed form of MLA."""

import dataclasses

import pytest
import torch

from pagebinder.custom_ops.latent.write import latent_cache_write_reference
from tests.custom_ops.test_mla import CASES, assert_mla_close, make_inputs

NAMES = [
    "decode",
    "mixed",
    "window",
    "no multiples",
    "narrow latent",
    "many heads",
]


@pytest.mark.parametrize("name", NAMES)
def test_paged_mla_attention(provider, name):
    for dtype in (torch.float32, torch.bfloat16) if name in ("decode", "mixed") else (torch.float32,):
        inputs = make_inputs(dataclasses.replace(CASES[name], dtype=dtype))
        options = inputs.options
        out = provider.overload("paged_mla_attention")(*inputs.operands, **options)
        assert out.dtype == dtype and out.is_contiguous()
        assert_mla_close(out, inputs.wide().run("pagebinder"))


def test_a_long_context_is_split(provider):
    inputs = make_inputs(dataclasses.replace(CASES["split"], lengths=((700, 1), (600, 3))))
    out = provider.overload("paged_mla_attention")(*inputs.operands, **inputs.options)
    assert_mla_close(out, inputs.run("pagebinder"))


def test_what_has_no_kernel_is_refused(provider):
    for name, message in (("indices", "lists of indices"), ("fp8", "layout fp8_v32")):
        inputs = make_inputs(CASES[name])
        with pytest.raises(ValueError, match=message):
            provider.overload("paged_mla_attention")(*inputs.operands, **inputs.options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_cache_write(provider, dtype):
    rows = torch.randn(6, 72)
    slots = torch.tensor([3, -1, 17, 0, 23, 9], dtype=torch.int32)
    ours, theirs = (torch.full((3, 8, 72), 7.0, dtype=dtype) for _ in range(2))
    provider.overload("latent_cache_write")(rows, ours, slots)
    latent_cache_write_reference(rows, theirs, slots)
    assert torch.equal(ours, theirs)
