"""Cache writes in Triton: rows and bytes of the reference, at any strides; what has no slot is not written."""

import pytest
import torch

from pagebinder.custom_ops.attention.paged import kv_cache_write_reference
from pagebinder.custom_ops.attention.quantized_paged import quantized_kv_cache_write_reference
from tests.custom_ops.test_kv_cache_write import (  # noqa: F401  (run here with `write` below)
    BAD,
    expected_cache,
    test_worked_slot_example,
)
from tests.custom_ops.test_quantized_kv import CODES, fixed_scales
from tests.custom_ops.triton.on_device import DEVICE


@pytest.fixture(scope="module")
def write(provider):
    return provider.overload("kv_cache_write")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "width", "width_v", "block_size"), [(1, 130, 7, 1), (3, 16, 16, 3), (40, 64, 96, 16)]
)
def test_rows_land_in_their_slots(write, dtype, heads, width, width_v, block_size):
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(9, heads, width + width_v + 3, generator=generator).to(dtype)
    k, v = kv[..., :width], kv[..., width : width + width_v]
    slots = torch.randperm(12 * block_size, generator=generator)[:9].tolist()
    slots[4] = -1
    arena = torch.randn(12, 2, block_size, heads, width + width_v, generator=generator).to(dtype)
    before, cache = arena.clone(), arena[:, 1].transpose(1, 2)  # one layer of an arena, tokens before heads
    expected = expected_cache(k, v, cache, slots)
    assert write(k, v, cache, torch.tensor(slots, dtype=torch.int32)) is None
    assert torch.equal(cache, expected) and torch.equal(arena[:, 0], before[:, 0])


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("codes", CODES)
def test_codes_are_those_of_the_reference_to_the_bit(provider, codes, fixed):
    """Magnitudes from subnormal codes to saturation, ties, zeros, NaN and infinity; rows that begin anywhere."""
    generator = torch.Generator().manual_seed(0)
    write = provider.overload("quantized_kv_cache_write")
    for width, width_v, dtype in ((64, 48, torch.float32), (7, 33, torch.bfloat16), (20, 80, torch.float16)):
        k = torch.randn(9, 3, width, generator=generator) * torch.logspace(-5, 3, 9)[:, None, None]
        v = torch.arange(9 * 3 * width_v).view(9, 3, width_v) / 64 * 1.0
        k[3], k[4, 1, 2], v[5, 0, 1] = 0.0, float("nan"), float("inf")
        k, v = k.to(dtype), v.to(dtype)
        slots = torch.randperm(40, generator=generator)[:9].int()
        slots[7] = -1
        scales = fixed_scales(3) if fixed else None
        row_bytes = width + width_v + (0 if fixed else 8)
        ours = torch.randint(0, 256, (5, 3, 8, row_bytes + 3), dtype=torch.uint8, generator=generator)
        theirs = ours.clone()
        write(k, v, ours[..., 1:-2], slots, scales, codes=codes)
        quantized_kv_cache_write_reference(k, v, theirs[..., 1:-2], slots, scales, codes=codes)
        assert torch.equal(ours, theirs)


def test_a_slot_outside_the_cache_is_not_written(write):
    k, v, cache = torch.randn(3, 2, 8), torch.randn(3, 2, 4), torch.zeros(4, 2, 16, 12)
    expected = cache.clone()
    kv_cache_write_reference(k, v, expected, torch.tensor([5, -1, -1], dtype=torch.int32))
    write(k, v, cache, torch.tensor([5, 64, 1 << 30], dtype=torch.int32))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("message", sorted(set(BAD) - {"slot"}))
def test_bad_shapes_and_dtypes_raise(write, message):
    k, v, cache = torch.randn(3, 2, 8), torch.randn(3, 2, 4), torch.zeros(4, 2, 16, 12)
    operands = BAD[message](k, v, cache, torch.tensor([0, 5, 63], dtype=torch.int32))
    with pytest.raises((ValueError, RuntimeError), match=message):
        write(*operands)


def test_opcheck(write):
    k, v, cache = (torch.randn(shape, device=DEVICE) for shape in ((3, 2, 8), (3, 2, 4), (4, 2, 16, 12)))
    slots = torch.tensor([0, -1, 63], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(torch.ops.pagebinder_triton.kv_cache_write, (k, v, cache, slots))
