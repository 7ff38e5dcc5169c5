"""Byte layouts of latent caches: golden bytes, page structure, and what a trip through them may cost."""

import pytest
import torch

from pagebinder.custom_ops.latent import small_floats
from pagebinder.custom_ops.latent.layouts import (
    load_rows,
    pack_pages,
    row_bytes,
    row_layout,
    rows_per_block,
    store_rows,
    unpack_pages,
)

DEEPSEEK = {
    "fp8_v4": (512, 64, 584),
    "fp8_v32": (576, 64, 656),
    "fp8_index": (128, 0, 132),
    "fp4_index": (128, 0, 68),
}
SMALL = {"fp8_v4": (80, 16), "fp8_v32": (134, 6), "fp8_index": (48, 0), "fp4_index": (64, 0)}


def every_bfloat16() -> torch.Tensor:
    """All positive finite values, as float32."""
    return torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def random_rows(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Rows whose magnitudes span many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, 12, (num_rows, 1), generator=generator)
    return torch.randn(num_rows, width, generator=generator) * torch.exp2(powers.float())


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0, 105),
        (1e-4, 105),
        (0.0625, 115),
        (1, 119),
        (3.3, 120),
        (447.9, 127),
        (448, 127),
        (449, 128),
        (1e30, 218),
    ],
)
def test_golden_scale_bytes(amax, byte):
    block = torch.zeros(64)
    block[17] = -amax
    assert int(small_floats.quantise_fp8(block)[1]) + 127 == byte


def test_fp8_exponents_are_least_for_every_bfloat16():
    amax = every_bfloat16()
    e = small_floats.ue8m0_exponent(amax, floor=1e-4, top=1.75, top_exponent=8).double()
    bounded = amax.clamp(min=1e-4).double()
    assert bool((bounded <= 448 * torch.exp2(e)).all()) and bool((bounded > 448 * torch.exp2(e - 1)).all())


def test_fp4_exponents_are_least_for_every_bfloat16():
    amax = every_bfloat16()
    e = small_floats.ue8m0_exponent(amax, floor=6 * 2.0**-126, top=1.5, top_exponent=2).double()
    bounded = amax.double().clamp(min=6 * 2.0**-126)
    assert bool((bounded <= 6 * torch.exp2(e)).all()) and bool((bounded > 6 * torch.exp2(e - 1)).all())


def test_e2m1_rounds_to_nearest_even():
    x = torch.arange(-32, 33) / 4.0
    x = torch.cat([x, x.nextafter(torch.tensor(-9.0)), x.nextafter(torch.tensor(9.0))])
    values = torch.tensor(small_floats.E2M1_VALUES)
    distance = (x.abs().clamp(max=6.0)[:, None] - values).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    expected = (nearest * (1 + even)).argmax(1)  # of two that are as near, the even code
    codes = small_floats.to_e2m1(x)
    assert torch.equal(codes & 7, expected.to(torch.uint8))
    assert torch.equal(codes >> 3, torch.signbit(x).to(torch.uint8))
    assert torch.equal(small_floats.from_e2m1(codes).abs(), values[expected])


def test_ue8m0_bytes():
    decoded = small_floats.from_ue8m0(torch.tensor([0, 1, 105, 127, 254, 255], dtype=torch.uint8))
    assert decoded[:-1].tolist() == [2.0**e for e in (-127, -126, -22, 0, 127)] and decoded[-1].isnan()


@pytest.mark.parametrize("layout", DEEPSEEK)
def test_sizes(layout):
    width, rope, size = DEEPSEEK[layout]
    assert row_bytes(layout, width=width, rope_dim=rope) == size
    spec = row_layout(layout, width, rope)
    for entries in (1, 2, 63, 64, 128):
        for padded in (False, True):
            assert spec.entries(spec.page_bytes(entries, padded=padded)) == entries
    if layout == "fp8_v4":
        assert spec.page_bytes(64, padded=True) == 37440 and spec.page_bytes(2, padded=True) == 3 * 576


def e4m3(x):
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def test_fp8_v4_page():
    """Rows [448 e4m3 | 64 bf16], then 7 scales and a zero for each, then padding."""
    rows = random_rows(3, 512).bfloat16()
    page = torch.full((1, 4 * 576), 0xAB, dtype=torch.uint8)
    store_rows(rows, page, torch.arange(3), "fp8_v4", 64)
    page = page[0]
    for i, row in enumerate(rows):
        data, scales = page[576 * i : 576 * (i + 1)], page[3 * 576 + 8 * i : 3 * 576 + 8 * (i + 1)]
        assert torch.equal(data[448:], row[448:].view(torch.uint8)), "RoPE channels are kept bit by bit"
        assert int(scales[7]) == 0
        for b, block in enumerate(row[:448].float().split(64)):
            e = int(scales[b]) - 127
            assert 2.0 ** (e - 1) < float(block.abs().max()) / 448 <= 2.0**e
            assert torch.equal(data[64 * b : 64 * (b + 1)], e4m3(block * 2.0**-e))
    assert bool((page[3 * 584 :] == 0xAB).all()), "padding is not written"


def test_fp8_v32_page():
    """Entry after entry: 512 e4m3, 4 float32 scales amax / 448, 64 bf16."""
    rows = random_rows(3, 576).bfloat16()
    page = pack_pages(rows[None], "fp8_v32", 64)[0]
    assert len(page) == 3 * 656
    for entry, row in zip(page.split(656), rows):
        scales = entry[512:528].view(torch.float32)
        blocks = row[:512].float().view(4, 128)
        assert torch.equal(scales, blocks.abs().amax(1) / 448)
        assert torch.equal(entry[:512], e4m3(blocks / scales[:, None]).flatten())
        assert torch.equal(entry[528:], row[512:].view(torch.uint8))


def test_fp8_index_page():
    rows = random_rows(3, 128).bfloat16()
    page = pack_pages(rows[None], "fp8_index")[0]
    scales = page[3 * 128 :].view(torch.float32)
    assert len(scales) == 3 and not bool((scales.view(torch.int32) & 0x7FFFFF).any()), "powers of two"
    for i, row in enumerate(rows.float()):
        assert 0.5 * scales[i] < row.abs().max() / 448 <= scales[i]
        assert torch.equal(page[128 * i : 128 * (i + 1)], e4m3(row / scales[i]))


def test_fp4_index_page():
    rows = random_rows(3, 128).bfloat16()
    page = pack_pages(rows[None], "fp4_index")[0]
    assert len(page) == 3 * 68
    for i, row in enumerate(rows.float()):
        scales = page[3 * 64 + 4 * i : 3 * 64 + 4 * (i + 1)]
        codes = small_floats.to_e2m1((row.view(4, 32) / small_floats.from_ue8m0(scales)[:, None]).flatten())
        data = page[64 * i : 64 * (i + 1)]
        assert torch.equal(data & 15, codes[::2]) and torch.equal(data >> 4, codes[1::2]), "even element low"


@pytest.mark.parametrize("layout", DEEPSEEK)
@pytest.mark.parametrize("sizes", [DEEPSEEK, SMALL])
def test_round_trip(layout, sizes):
    width, rope = sizes[layout][:2]
    rows = random_rows(60, width)
    rows[:3] = torch.tensor([0.0, 1e-30, 1e38])[:, None]
    rows = rows.bfloat16().float().view(10, 6, width)
    back = unpack_pages(pack_pages(rows, layout, rope, padded=True), layout, width, rope)
    spec = row_layout(layout, width, rope)
    assert torch.equal(back[..., spec.nope :], rows[..., spec.nope :])
    blocks = rows[..., : spec.nope].unflatten(-1, (-1, spec.block))
    error = (back[..., : spec.nope].unflatten(-1, (-1, spec.block)) - blocks).abs()
    amax = blocks.abs().amax(-1, keepdim=True)
    if layout == "fp4_index":
        e = small_floats.ue8m0_exponent(amax, floor=6 * 2.0**-126, top=1.5, top_exponent=2)
        assert bool((error <= torch.exp2(e.double())).all())
    elif layout == "fp8_v32":
        scale = (amax / 448).clamp(
            min=2.0**-126
        )  # not a power of two: dividing and multiplying round as well
        assert bool((error <= 16 * scale + 2.0**-22 * amax).all())
    else:
        e = small_floats.ue8m0_exponent(amax, floor=1e-4, top=1.75, top_exponent=8)
        assert bool((error <= 16 * torch.exp2(e.double())).all())


@pytest.mark.parametrize("layout", DEEPSEEK)
def test_what_was_quantised_is_kept_when_it_is_quantised_again(layout):
    width, rope = DEEPSEEK[layout][:2]
    once = unpack_pages(pack_pages(random_rows(8, width)[None], layout, rope), layout, width, rope)
    again = unpack_pages(pack_pages(once, layout, rope), layout, width, rope)
    torch.testing.assert_close(again, once, rtol=0 if layout != "fp8_v32" else 2**-3, atol=0)


def test_nan_and_infinity():
    rows = torch.ones(2, 1, 128)
    rows[0, 0, 5], rows[1, 0, 5] = float("nan"), float("inf")
    for layout in ("fp8_index", "fp4_index"):
        back = unpack_pages(pack_pages(rows, layout), layout, 128)
        assert back[0, 0, 5].isnan() and not back[1].isnan().any(), "NaN stays; infinity saturates"


def test_plain_rows():
    rows = random_rows(12, 20).view(3, 4, 20)
    assert pack_pages(rows, "plain") is rows and torch.equal(unpack_pages(rows, "plain", 20), rows)
    cache = torch.zeros(3, 4, 20, dtype=torch.float16)
    slots = torch.tensor([11, 0, 5])
    store_rows(rows[0, :3], cache, slots, "plain")
    assert torch.equal(load_rows(cache, slots, "plain", 20), rows[0, :3].half().float())
    assert int(cache.any(-1).sum()) == 3


def test_sizes_that_no_layout_holds():
    for layout, width, rope, message in [
        ("fp8_v5", 512, 64, "unknown layout"),
        ("fp8_v4", 500, 64, "multiples of 64"),
        ("fp8_v4", 64, 64, "less than the width"),
        ("fp8_v4", 67, 3, "even"),
        ("fp8_v32", 512, 64, "multiples of 128"),
        ("fp8_index", 128, 64, "rope_dim 0"),
        ("fp8_index", 100, 0, "multiples of 16"),
        ("fp4_index", 48, 0, "multiples of 32"),
    ]:
        with pytest.raises(ValueError, match=message):
            row_layout(layout, width, rope)
    for cache, layout, message in [
        (torch.zeros(2, 8), "plain", "a plain cache"),
        (torch.zeros(2, 8, 100), "plain", "100 wide"),
        (torch.zeros(2, 8, 128, dtype=torch.int8), "plain", "float type"),
        (torch.zeros(2, 264), "fp8_index", "uint8"),
        (torch.zeros(2, 131, dtype=torch.uint8), "fp8_index", "at least one entry"),
        (torch.zeros(264, 2, dtype=torch.uint8).T, "fp8_index", "last stride"),
    ]:
        with pytest.raises(ValueError, match=message):
            rows_per_block(cache, layout, 128)
