"""latent_cache_write and kv_rope_quant_store: every provider stores the bytes of `latent.layouts`, no others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.custom_ops.latent.layouts import PLAIN_DTYPES, load_rows, row_layout, store_rows
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.errors import CompilerNotFoundError

# layout, width, rope_dim: DeepSeek's sizes and small ones, with vectors that are not full
SIZES = [
    ("fp8_v4", 512, 64), ("fp8_v4", 80, 16), ("fp8_v4", 70, 6), ("fp8_v32", 576, 64), ("fp8_v32", 134, 6),
    ("fp8_index", 128, 0), ("fp8_index", 48, 0), ("fp4_index", 128, 0), ("fp4_index", 32, 0),
    ("plain", 512, 0), ("plain", 37, 0),
]  # fmt: skip
KINDS = ["random", "tiny", "huge", "zero", "tops", "midpoints"]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def provider(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    if reasons := chosen.reasons_against(OpNeed(op="latent_cache_write")):
        pytest.skip(", ".join(reasons))
    chosen.prepare()
    return chosen


def make_rows(kind: str, num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """float32 rows; "tops": largest magnitudes at and beside 2^k, 448 * 2^k and 6 * 2^k; "midpoints": ties."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, width, generator=generator)
    if kind == "tiny":
        return rows * 2.0 ** torch.randint(-60, -20, (num_rows, 1), generator=generator)
    if kind == "huge":
        return rows * 2.0 ** torch.randint(40, 120, (num_rows, 1), generator=generator)
    if kind == "zero":
        return torch.where(rows > 0, 0.0, -0.0)
    if kind == "tops":
        top = torch.tensor([1.0, 448.0, 6.0])[torch.arange(num_rows) % 3]
        beside = torch.tensor([1.0, 1 + 2.0**-7, 1 - 2.0**-7])[torch.arange(num_rows) // 3 % 3]
        powers = torch.exp2(torch.arange(num_rows) % 61 - 30.0)
        rows = rows.clamp(-1, 1) * powers[:, None]
        rows[:, ::16] = (top * beside * powers)[:, None]
        return rows
    if kind == "midpoints":
        rows = torch.randint(-64, 65, (num_rows, width), generator=generator) / 8.0
        rows[:, ::16] = 6.0
    return rows


def make_cache(layout, width, rope_dim, num_blocks, entries, dtype, padding=24):
    """A view of a wider arena, a block stride apart, filled with 0x5A; (cache, arena)."""
    if layout == "plain":
        arena = torch.full((num_blocks, entries * width + padding), 7.0, dtype=dtype)
        return arena[:, 8 : 8 + entries * width].unflatten(1, (entries, width)), arena
    size = row_layout(layout, width, rope_dim).page_bytes(entries, padded=True)
    arena = torch.full((num_blocks, size + padding), 0x5A, dtype=torch.uint8)
    return arena[:, 8 : 8 + size], arena


def make_slots(num_tokens, num_slots, generator):
    """Distinct slots, about every fifth -1."""
    slots = torch.randperm(num_slots, generator=generator)[:num_tokens].int()
    return slots.masked_fill(torch.rand(num_tokens, generator=generator) < 0.2, -1)


@pytest.mark.parametrize(("layout", "width", "rope_dim"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
def test_bytes_are_those_of_the_layout(provider, layout, width, rope_dim, kind, dtype):
    rows = make_rows(kind, 150, width).to(dtype)
    slots = make_slots(150, 23 * 7, torch.Generator().manual_seed(1))
    cache, arena = make_cache(layout, width, rope_dim, 23, 7, torch.bfloat16)
    expected_cache, expected = make_cache(layout, width, rope_dim, 23, 7, torch.bfloat16)
    store_rows(rows[slots >= 0], expected_cache, slots[slots >= 0], layout, rope_dim)
    write = provider.overload("latent_cache_write")
    assert write(rows, cache, slots, layout=layout, rope_dim=rope_dim) is None
    assert torch.equal(arena.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
@pytest.mark.parametrize("cache_dtype", PLAIN_DTYPES)
def test_plain_rows_are_converted(provider, dtype, cache_dtype):
    rows = make_rows("random", 20, 37).to(dtype)
    cache, arena = make_cache("plain", 37, 0, 3, 8, cache_dtype)
    provider.overload("latent_cache_write")(rows, cache, torch.arange(2, 22, dtype=torch.int32))
    assert torch.equal(cache.reshape(24, 37)[2:22], rows.to(cache_dtype))
    assert bool((arena[:, :8] == 7).all()) and bool((cache.reshape(24, 37)[[0, 1, 22, 23]] == 7).all())


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_rotated_rows_have_the_same_bits_everywhere(provider, data):
    layout, width, rope_dim = data.draw(st.sampled_from(SIZES))
    num_tokens, pairs = data.draw(st.integers(0, 40)), data.draw(st.integers(0, width // 2))
    dtype, table_dtype = (data.draw(st.sampled_from(PLAIN_DTYPES)) for _ in range(2))
    cache_dtype = data.draw(st.sampled_from(PLAIN_DTYPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    kv = torch.randn(num_tokens, width + 3, generator=generator).to(dtype)[:, :width]
    angles = 1000 * torch.randn(num_tokens, pairs, generator=generator)
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    slots = make_slots(num_tokens, 77, generator)
    rows = kv.to(torch.float32, copy=True)
    even, odd = rows[:, width - 2 * pairs :: 2].clone(), rows[:, width - 2 * pairs + 1 :: 2].clone()
    rows[:, width - 2 * pairs :: 2] = even * cos.float() - odd * sin.float()
    rows[:, width - 2 * pairs + 1 :: 2] = even * sin.float() + odd * cos.float()
    expected_cache, expected = make_cache(layout, width, rope_dim, 11, 7, cache_dtype)
    store_rows(rows[slots >= 0], expected_cache, slots[slots >= 0], layout, rope_dim)
    cache, arena = make_cache(layout, width, rope_dim, 11, 7, cache_dtype)
    store = provider.overload("kv_rope_quant_store")
    assert store(kv, cos, sin, cache, slots, layout=layout, rope_dim=rope_dim) is None
    assert torch.equal(arena.view(torch.uint8), expected.view(torch.uint8))


def test_many_rows_on_all_threads(provider):
    rows = make_rows("random", 3000, 512)
    cache, _ = make_cache("fp8_v4", 512, 64, 50, 64, None)
    slots = torch.randperm(3200, generator=torch.Generator().manual_seed(0))[:3000].int()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        provider.overload("latent_cache_write")(rows, cache, slots, layout="fp8_v4", rope_dim=64)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(load_rows(cache, slots, "fp8_v4", 512, 64), rows, rtol=2**-4, atol=0.02)


def test_nan_stays_in_its_block(provider):
    rows = torch.ones(2, 512)
    rows[0, 5] = float("nan")
    cache, _ = make_cache("fp8_v4", 512, 64, 2, 4, None)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    provider.overload("latent_cache_write")(rows, cache, slots, layout="fp8_v4", rope_dim=64)
    back = load_rows(cache, slots, "fp8_v4", 512, 64)
    assert back[0, 5].isnan() and not back[0, 64:].isnan().any() and not back[1].isnan().any()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD = {
    "outside the cache": {"slots": int32(0, 5, 1000)},
    "int32": {"slots": torch.tensor([0, 5, 6])},
    "one slot a token": {"slots": int32(0, 5)},
    "wide, not": {"rows": torch.randn(3, 40)},
    "last stride": {"cache": torch.zeros(4, 36, 8).transpose(1, 2)},
    "unknown layout": {"layout": "fp8_v5"},
    "uint8": {"layout": "fp4_index", "rows": torch.randn(3, 64), "cache": torch.zeros(4, 340)},
    "at least one entry": {
        "layout": "fp8_index", "rows": torch.randn(3, 64), "cache": torch.zeros(4, 60, dtype=torch.uint8)
    },
    "multiples of 64": {
        "layout": "fp8_v4", "rows": torch.randn(3, 100), "cache": torch.zeros(4, 900, dtype=torch.uint8)
    },
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_operands_raise(provider, message):
    operands = {"rows": torch.randn(3, 36), "cache": torch.zeros(4, 8, 36), "slots": int32(0, 5, 31)}
    operands = {**operands, "layout": "plain", **BAD[message]}
    rows, cache, slots, layout = operands.values()
    with pytest.raises((ValueError, RuntimeError), match=message):
        provider.overload("latent_cache_write")(rows, cache, slots, layout=layout)
    table = torch.ones(3, 8)
    with pytest.raises((ValueError, RuntimeError), match=message):
        provider.overload("kv_rope_quant_store")(rows, table, table, cache, slots, layout=layout)


@pytest.mark.parametrize(
    ("message", "cos", "sin"),
    [
        ("one row a token", torch.ones(2, 8), torch.ones(2, 8)),
        ("pairs", torch.ones(3, 8), torch.ones(3, 7)),
        ("more channels", torch.ones(3, 19), torch.ones(3, 19)),
        ("one float type", torch.ones(3, 8), torch.ones(3, 8).half()),
    ],
)
def test_bad_tables_raise(provider, message, cos, sin):
    store = provider.overload("kv_rope_quant_store")
    with pytest.raises((ValueError, RuntimeError), match=message):
        store(torch.randn(3, 36), cos, sin, torch.zeros(4, 8, 36), int32(0, 5, 31))


def test_opcheck(provider):
    rows, table, slots = torch.randn(3, 80), torch.randn(3, 8), int32(0, -1, 11)
    paged = torch.zeros(2, 8 * 104, dtype=torch.uint8)
    options = {"layout": "fp8_v4", "rope_dim": 16}
    write, store = provider.overload("latent_cache_write"), provider.overload("kv_rope_quant_store")
    torch.library.opcheck(write, (rows, torch.zeros(2, 8, 80), slots))
    torch.library.opcheck(write, (rows, paged, slots), options)
    torch.library.opcheck(store, (rows, table, table, paged, slots), options)
