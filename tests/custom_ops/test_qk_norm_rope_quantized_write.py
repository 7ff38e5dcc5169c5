"""Norm of heads + RoPE + the write of codes: the cpu kernel against the separate kernels and the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from pagebinder.custom_ops.cpu import build
from pagebinder.custom_ops.providers import registered_providers
from tests.custom_ops.test_qk_norm_rope_write import BLOCK, BLOCKS, FORMS, G, operands

OURS, CPU = torch.ops.pagebinder, torch.ops.pagebinder_cpu
CODES = ("fp8_e4m3", "fp8_e5m2", "int8")


@pytest.fixture(scope="module")
def kernel():
    if build.problem() is not None:
        pytest.skip(str(build.problem()))
    provider = registered_providers()["cpu"]
    for op in ("qk_norm_rope_write", "qk_norm_rope_quantized_write"):
        provider.prepare(op)
    return provider.overload("qk_norm_rope_quantized_write")


def quantized(dtype, codes, *, fixed=False, **form):
    """As `operands`, with a cache of codes inside of something larger."""
    (*heads, cache, slots), options = operands(dtype, **form)
    scales = torch.linspace(0.01, 0.4, 2 * G).view(2, G) if fixed else None
    row_bytes = cache.shape[-1] + (0 if fixed else 8)
    rows = torch.full((BLOCKS, G, BLOCK + 1, row_bytes + 3), 7, dtype=torch.uint8)
    return (*heads, rows[:, :, :BLOCK, 1:-2], slots, scales), {**options, "codes": codes}


@pytest.mark.parametrize("fixed", [False, True], ids=["own scales", "fixed scales"])
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_those_of_the_separate_ops(kernel, dtype, codes, fixed):
    """Heads by the fused kernel of plain caches, codes by the kernel that only writes."""
    for (style, tail, wide), turned in itertools.product(FORMS, (None, 10)):
        form = {"style": style, "tail": tail, "wide": wide, "width": 40, "turned": turned}
        ours, options = quantized(dtype, codes, fixed=fixed, **form)
        theirs, _ = quantized(dtype, codes, fixed=fixed, **form)
        (*heads, plain_cache, slots), plain_options = operands(dtype, **form)
        expected = CPU.qk_norm_rope_write(*heads, plain_cache, slots, **plain_options)
        kept = slots >= 0
        rows = plain_cache[slots[kept] // BLOCK, :, slots[kept] % BLOCK]
        k = torch.zeros_like(heads[1]).index_put((kept,), rows[..., : heads[1].shape[-1]])
        CPU.quantized_kv_cache_write(k, heads[2], theirs[7], slots, theirs[9], codes=codes)
        assert torch.equal(kernel(*ours, **options), expected)
        assert torch.equal(ours[7], theirs[7])
        if not tail:  # no norm, so nothing is summed in another order
            own, _ = quantized(dtype, codes, fixed=fixed, **form)
            assert torch.equal(OURS.qk_norm_rope_quantized_write(*own, **options), expected)
            assert torch.equal(ours[7], own[7])


def test_bad_operands_raise(kernel):
    for op in (kernel, OURS.qk_norm_rope_quantized_write):
        (*heads, cache, slots, _), options = quantized(torch.float32, "int8")
        cases = {
            "slot": ((*heads, cache, slots + 1, None), options),
            "style": ((*heads, cache, slots, None), {**options, "style": "deinterleaved"}),
            "codes": ((*heads, cache, slots, None), {**options, "codes": "int4"}),
            "bytes": ((*heads, cache[..., :-1], slots, None), options),
            "uint8": ((*heads, cache.view(torch.int8), slots, None), options),
        }
        for message, (args, named) in cases.items():
            with pytest.raises((RuntimeError, ValueError), match=message):
                op(*args, **named)


def test_opcheck(kernel):
    args, options = quantized(torch.bfloat16, "fp8_e4m3")
    torch.library.opcheck(kernel, args, options)
