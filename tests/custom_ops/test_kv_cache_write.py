"""kv_cache_write: every provider scatters the same rows to the same slots, and touches nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.custom_ops.paged_cases import SLOT_EXAMPLE

PROVIDERS = ["reference", "cpu"]


@pytest.fixture(scope="module", params=PROVIDERS)
def write(request):
    provider = registered_providers()[request.param]
    if isinstance(provider.problem(), CompilerNotFoundError):
        pytest.skip(str(provider.problem()))
    provider.prepare()
    return provider.overload("kv_cache_write")


def expected_cache(k, v, cache, slots):
    """Row by row, in plain Python."""
    cache = cache.clone()
    for t, slot in enumerate(slots):
        if slot >= 0:
            for g in range(k.shape[1]):
                row = torch.cat([k[t, g], v[t, g]])
                cache[slot // cache.shape[2], g, slot % cache.shape[2]] = row
    return cache


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_rows_land_in_their_slots(write, data):
    num_tokens, num_heads = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 4))
    width, width_v = data.draw(st.integers(1, 130)), data.draw(st.integers(1, 130))
    block_size, num_blocks = data.draw(st.sampled_from([1, 3, 16, 256])), data.draw(st.integers(1, 50))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].tolist()
    slots = [-1 if data.draw(st.integers(0, 4)) == 0 else slot for slot in slots]
    slots += [-1] * (num_tokens - len(slots))
    kv = torch.randn(num_tokens, num_heads, width + width_v + 3, generator=generator).to(dtype)
    k, v = kv[..., :width], kv[..., width : width + width_v]
    if data.draw(st.booleans()):  # one layer of an arena that stores tokens before heads
        arena = torch.randn(num_blocks, 2, block_size, num_heads, width + width_v, generator=generator).to(
            dtype
        )
        cache, other = arena[:, 1].transpose(1, 2), arena[:, 0].clone()
    else:
        arena = cache = torch.randn(
            num_blocks, num_heads, block_size, width + width_v, generator=generator
        ).to(dtype)
        other = None
    expected = expected_cache(k, v, cache, slots)
    assert write(k, v, cache, torch.tensor(slots, dtype=torch.int32)) is None
    assert torch.equal(cache, expected)
    assert other is None or torch.equal(arena[:, 0], other)


def test_worked_slot_example(write):
    block_size = SLOT_EXAMPLE["block_size"]
    slots = []
    for (seq_len, query_len), table in zip(SLOT_EXAMPLE["seq_and_query_lens"], SLOT_EXAMPLE["tables"]):
        for position in range(seq_len - query_len, seq_len):
            slots.append(table[position // block_size] * block_size + position % block_size)
    assert slots == SLOT_EXAMPLE["slots"]
    k = torch.arange(1.0, len(slots) + 1)[:, None, None].expand(-1, 1, 4).contiguous()
    cache = torch.zeros(9, 1, block_size, 6)
    write(k, k[..., :2], cache, torch.tensor(slots, dtype=torch.int32))
    flat = cache[:, 0].reshape(-1, 6)
    assert flat.any(1).nonzero().flatten().tolist() == slots
    assert torch.equal(flat[slots, 0], k[:, 0, 0])


def test_large_write_uses_all_threads_correctly(write):
    k, v = torch.randn(3000, 8, 64), torch.randn(3000, 8, 64)
    cache = torch.zeros(200, 8, 16, 128)
    slots = torch.randperm(3200)[:3000].int()
    write(k, v, cache, slots)
    rows = cache.transpose(1, 2).reshape(3200, 8, 128)
    assert torch.equal(rows[slots.long()], torch.cat([k, v], -1))


BAD = {
    "slot": lambda k, v, cache, slots: (k, v, cache, slots + 1000),
    "dtype": lambda k, v, cache, slots: (k.half(), v.half(), cache, slots),
    "row": lambda k, v, cache, slots: (k, v[..., :3], cache, slots),
    "heads": lambda k, v, cache, slots: (k[:, :1], v[:, :1], cache, slots),
    "int32": lambda k, v, cache, slots: (k, v, cache, slots.long()),
    "one slot a token": lambda k, v, cache, slots: (k, v, cache, slots[:-1]),
    "last stride": lambda k, v, cache, slots: (
        k,
        v,
        cache.transpose(2, 3).contiguous().transpose(2, 3),
        slots,
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_operands_raise(write, message):
    k, v, cache = torch.randn(3, 2, 8), torch.randn(3, 2, 4), torch.zeros(4, 2, 16, 12)
    operands = BAD[message](k, v, cache, torch.tensor([0, 5, 63], dtype=torch.int32))
    with pytest.raises((ValueError, RuntimeError), match=message):
        write(*operands)


def test_opcheck(write):
    k, v, cache = torch.randn(3, 2, 8), torch.randn(3, 2, 4), torch.zeros(4, 2, 16, 12)
    torch.library.opcheck(write, (k, v, cache, torch.tensor([0, -1, 63], dtype=torch.int32)))
