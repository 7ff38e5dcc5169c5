"""K and V in a byte a value: formats, writing and attention of every provider against the reference."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagebinder.config import KV_DTYPES
from pagebinder.custom_ops.attention.paged import paged_attention_reference
from pagebinder.custom_ops.attention.quantized_cache import (
    KV_FORMATS,
    LARGEST_CODE,
    decode_kv,
    decode_rows,
    encode_kv,
    encode_rows,
    error_bound,
)
from pagebinder.custom_ops.attention.quantized_paged import quantized_paged_attention_reference
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.custom_ops.paged_cases import Case, Inputs, cases, make_inputs
from tests.tolerances import assert_close

PROVIDERS = ["cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODES = list(LARGEST_CODE)
relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", params=PROVIDERS)
def provider(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    need = OpNeed(op="quantized_paged_attention", features=frozenset({"int8", "sinks"}))
    assert chosen.reasons_against(need) == []
    chosen.prepare("quantized_paged_attention")
    return chosen


def fixed_scales(num_heads: int) -> torch.Tensor:
    return torch.linspace(0.004, 0.06, 2 * num_heads).view(2, num_heads)


def quantised(case: Case, codes: str, fixed: bool) -> Inputs:
    """The case with its cache in codes; rows that were NaN have a scale of NaN, or bytes that stand for anything."""
    inputs = make_inputs(case)
    q, cache, *rest = inputs.operands
    scales = fixed_scales(case.num_kv_heads) if fixed else None
    k, v = cache.transpose(1, 2).split((case.head_dim, case.head_dim_v), dim=-1)
    rows = encode_kv(k, v, codes, scales).transpose(1, 2)
    rows = torch.nn.functional.pad(rows, (2, 3))[..., 2:-3] if case.strided else rows.contiguous()
    return Inputs((q, rows, *rest, scales), {**inputs.options, "codes": codes})


# ---- formats


def test_formats_are_those_that_can_be_asked_for():
    assert set(KV_FORMATS) == set(KV_DTYPES) - {"auto", "fp8_ds_mla"}
    assert [KV_FORMATS[name].row_bytes(256) for name in ("int8", "fp8_e5m2_per_tensor")] == [264, 256]


@pytest.mark.parametrize("codes", CODES)
def test_values_come_back_within_the_bound(codes):
    x = torch.randn(50, 4, 33) * torch.logspace(-20, 6, 50)[:, None, None]
    x[3] = 0.0
    for scale in (None, torch.tensor([1e-3, 0.01, 1.0, 20.0]).expand(50, 4)):
        data, used = encode_rows(x, codes, scale)
        errors = (decode_rows(data, codes, used) - x).abs()
        assert (errors <= error_bound(x, codes, scale)).all()
        largest = LARGEST_CODE[codes] * used[..., None]
        assert (decode_rows(data, codes, used).abs() <= largest * (1 + 1e-6)).all()


@pytest.mark.parametrize("codes", CODES)
def test_a_nan_makes_its_own_row_nan_and_fixed_scales_saturate(codes):
    x = torch.randn(2, 1, 8)
    x[1, 0, 3] = float("nan")
    back = decode_rows(*reversed_args(encode_rows(x, codes, None), codes))
    assert back[0].isfinite().all() and back[1].isnan().all()
    one = torch.ones(2, 1)
    assert decode_rows(encode_rows(x, codes, one)[0], codes, one)[1, 0, 3] == LARGEST_CODE[codes]


def reversed_args(encoded, codes):
    data, scale = encoded
    return data, codes, scale


# ---- writing


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_written_bytes_are_those_of_the_reference(provider, dtype, codes, fixed):
    write = provider.overload("quantized_kv_cache_write")
    generator = torch.Generator().manual_seed(0)
    for width, width_v in ((64, 64), (7, 33), (80, 20)):
        k = torch.randn(60, 3, width, generator=generator) * 3
        v = torch.randn(60, 3, width_v, generator=generator) * torch.logspace(-6, 3, 60)[:, None, None]
        k[3], k[4, 1, 2], v[5, 0, 1] = 0.0, float("nan"), float("inf")
        k, v = k.to(dtype), v.to(dtype)
        slots = torch.randperm(10 * 8, generator=generator)[:60].int()
        slots[7] = -1
        scales = fixed_scales(3) if fixed else None
        row_bytes = width + width_v + (0 if fixed else 8)
        arena = torch.zeros(2, 10, 3, 8, row_bytes + 3, dtype=torch.uint8)[..., 1:-2]
        torch.ops.pagebinder.quantized_kv_cache_write(k, v, arena[0], slots, scales, codes=codes)
        write(k, v, arena[1], slots, scales, codes=codes)
        if not fixed:  # a NaN has many bit patterns
            broken = arena[:, slots[4] // 8, 1, slots[4] % 8, -8:-4]
            assert broken.contiguous().view(torch.float32).isnan().all()
            broken.zero_()
        assert torch.equal(arena[0], arena[1])


BAD = {
    "uint8": lambda k, v, cache, slots: (k, v, cache.view(torch.int8), slots),
    "row": lambda k, v, cache, slots: (k, v[..., :3], cache, slots),
    "heads": lambda k, v, cache, slots: (k[:, :1], v[:, :1], cache, slots),
    "int32": lambda k, v, cache, slots: (k, v, cache, slots.long()),
    "slot": lambda k, v, cache, slots: (k, v, cache, slots + 1000),
    "scales": lambda k, v, cache, slots: (k, v, cache[..., :12], slots, torch.ones(2, 3)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_operands_raise(provider, message):
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    cache = torch.zeros(4, 2, 16, 20, dtype=torch.uint8)
    operands = BAD[message](k, v, cache, torch.tensor([0, 5, 63], dtype=torch.int32))
    for op in (torch.ops.pagebinder.quantized_kv_cache_write, provider.overload("quantized_kv_cache_write")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            op(*operands, codes="fp8_e4m3")
        with pytest.raises((ValueError, RuntimeError), match="codes must be"):
            op(k, v, cache, torch.zeros(3, dtype=torch.int32), codes="fp8")


def test_opcheck(provider):
    quick = ("test_schema", "test_faketensor")  # tracing is that of the other paged ops
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    cache, slots = torch.zeros(4, 2, 16, 20, dtype=torch.uint8), torch.tensor([0, -1, 63], dtype=torch.int32)
    write = provider.overload("quantized_kv_cache_write")
    torch.library.opcheck(write, (k, v, cache, slots), {"codes": "int8"}, test_utils=quick)
    inputs = quantised(Case(((5, 2),)), "fp8_e4m3", False)
    attention = provider.overload("quantized_paged_attention")
    torch.library.opcheck(attention, inputs.operands, inputs.options, test_utils=quick)


# ---- attention


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("codes", CODES)
def test_reference_is_attention_over_decoded_rows(codes, fixed):
    inputs = quantised(Case(((40, 3), (0, 20)), options={"window": 30}), codes, fixed)
    q, cache, *rest, scales = inputs.operands
    plain = decode_kv(cache.transpose(1, 2), q.shape[2], codes, scales).transpose(1, 2)
    options = {name: value for name, value in inputs.options.items() if name != "codes"}
    expected = paged_attention_reference(q, plain, *rest, **options)
    torch.testing.assert_close(inputs.run(quantized_paged_attention_reference), expected, rtol=0, atol=0)


def check(attention, case: Case, codes: str, fixed: bool) -> torch.Tensor:
    inputs = quantised(case, codes, fixed)
    q, *rest = inputs.operands
    out = inputs.run(attention)
    expected = quantized_paged_attention_reference(q.float(), *rest, **inputs.options)
    assert out.dtype == case.dtype and out.is_contiguous()
    assert_close(out, expected)
    return out


@settings(relaxed, max_examples=30)
@given(case=cases(), codes=st.sampled_from(CODES), fixed=st.booleans())
def test_provider_against_reference(provider, case, codes, fixed):
    check(provider.overload("quantized_paged_attention"), case, codes, fixed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("group", [1, 3, 16])
def test_long_contexts_are_split(provider, dtype, codes, group):
    case = Case(((2500, 1), (511, 70)), dtype, num_kv_heads=1, group=group, sinks="finite", padding=1)
    check(provider.overload("quantized_paged_attention"), case, codes, False)


@pytest.mark.parametrize("codes", CODES)
def test_same_bits_in_any_batch_and_with_any_number_of_threads(provider, codes):
    if provider.name != "cpu":
        pytest.skip("promised by the cpu provider only")
    attention = provider.overload("quantized_paged_attention")
    case = Case(((1500, 1), (0, 90), (77, 5)), torch.bfloat16, group=4)
    inputs = quantised(dataclasses.replace(case, num_kv_heads=3), codes, False)
    q, cache, table, seq_lens, starts, *rest = inputs.operands
    together, threads = inputs.run(attention), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(inputs.run(attention), together)
    finally:
        torch.set_num_threads(threads)
    for r in range(3):
        part = slice(starts[r], starts[r + 1])
        own = torch.tensor([0, starts[r + 1] - starts[r]], dtype=torch.int32)
        operands = (q[part], cache, table[r : r + 1], seq_lens[r : r + 1], own, *rest)
        assert torch.equal(attention(*operands, **inputs.options), together[part])
