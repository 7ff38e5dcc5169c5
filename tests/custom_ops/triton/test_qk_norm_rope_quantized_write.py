"""Norm of heads + RoPE + the write of codes in Triton: the bits of the kernels that it stands for."""

import pytest
import torch

from tests.custom_ops.test_qk_norm_rope_quantized_write import CODES, quantized
from tests.custom_ops.test_qk_norm_rope_write import BLOCK, FORMS, operands
from tests.custom_ops.triton.on_device import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def ops(provider):
    names = ("qk_norm_rope_quantized_write", "qk_norm_rope_write", "quantized_kv_cache_write")
    return [provider.overload(name) for name in names]


@pytest.mark.parametrize(("codes", "fixed"), [*zip(CODES, (False, True, False)), ("fp8_e4m3", True)])
def test_bits_are_those_of_the_separate_ops(ops, codes, fixed):
    """Rows begin anywhere; without a norm nothing is summed, so the bits are the reference's as well."""
    fused, plain, write = ops
    for i, (style, tail, wide) in enumerate(FORMS[::11]):
        dtype, form = DTYPES[i % 3], {"style": style, "tail": tail, "wide": wide, "width": (24, 40)[i % 2]}
        form["turned"] = (None, 16, 6)[i % 3]
        ours, options = quantized(dtype, codes, fixed=fixed, **form)
        theirs, _ = quantized(dtype, codes, fixed=fixed, **form)
        (*heads, cache, slots), plain_options = operands(dtype, **form)
        expected = plain(*heads, cache, slots, **plain_options)
        kept = slots >= 0
        rows = cache[slots[kept] // BLOCK, :, slots[kept] % BLOCK]
        k = torch.zeros_like(heads[1]).index_put((kept,), rows[..., : heads[1].shape[-1]])
        write(k, heads[2], theirs[7], slots, theirs[9], codes=codes)
        found = fused(*ours, **options)
        assert torch.equal(found, expected) and torch.equal(ours[7], theirs[7])
        if not tail:
            own, _ = quantized(dtype, codes, fixed=fixed, **form)
            assert torch.equal(torch.ops.pagebinder.qk_norm_rope_quantized_write(*own, **options), found)
            assert torch.equal(ours[7], own[7])


def test_bad_operands_raise_and_other_slots_are_not_written(ops):
    (*heads, cache, slots, _), options = quantized(torch.float32, "int8")
    for message, args, named in (
        ("style", (*heads, cache, slots, None), {**options, "style": "deinterleaved"}),
        ("codes", (*heads, cache, slots, None), {**options, "codes": "int4"}),
        ("bytes", (*heads, cache[..., :-1], slots, None), options),
        ("uint8", (*heads, cache.view(torch.int8), slots, None), options),
        ("weights must be", (*heads, cache, slots, None), {**options, "tail": ""}),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            ops[0](*args, **named)
    before = cache.clone()
    ops[0](*heads, cache, torch.full_like(slots, 1 << 30), None, **options)
    assert torch.equal(cache, before)


def test_opcheck(provider):
    provider.overload("qk_norm_rope_quantized_write")
    args, options = quantized(torch.bfloat16, "fp8_e4m3")
    utils = ("test_schema", "test_faketensor")
    given = [None if x is None else x.to(DEVICE) for x in args]
    torch.library.opcheck(
        torch.ops.pagebinder_triton.qk_norm_rope_quantized_write, given, options, test_utils=utils
    )
