"""Compressors in Triton: entries and states of the definition, the same bits however a prompt is cut."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.custom_ops.latent.layouts import store_rows
from tests.custom_ops.compress_cases import Compressor, Paged
from tests.custom_ops.test_compress import (  # noqa: F401  (run here with the provider of this folder)
    COMPRESSORS,
    check,
    test_nan_stays_with_its_entries,
)
from tests.custom_ops.test_compress_operands import (  # noqa: F401
    BAD,
    NAMES,
    OPTIONS,
    operands,
    test_a_step_without_requests_or_tokens,
    test_good_operands,
)
from tests.custom_ops.triton.on_device import DEVICE, OF_A_KERNEL
from tests.helpers import nightly
from tests.tolerances import assert_close

# What only the device knows is not checked, see compress.py.
ON_DEVICE = ("rise from 0", "smaller than", "exceeds its", "is null", "is not valid")


@pytest.fixture(scope="module")
def store(provider):
    return provider.overload("compress_norm_rope_store")


@pytest.mark.parametrize(
    ("name", "block_size"), [("csa", 8), ("csa_odd", 7), ("hca", 10), ("pool", 8), ("pool_rotated", 7)]
)
def test_cuts_change_no_bit(store, name, block_size, cuts_of_14=([14], [5, 1, 8])):
    c, whole = COMPRESSORS[name], None
    for cuts in cuts_of_14:
        paged = Paged(store, c, [14], block_size)
        for new in cuts:
            paged.step([new])
        arrays = paged.entry_arena.nan_to_num(7.0), paged.states.nan_to_num(7.0)
        if whole is None:
            whole = arrays
            check(paged)
        assert all(torch.equal(a, b) for a, b in zip(arrays, whole))


@nightly
@pytest.mark.parametrize(
    ("name", "block_size"), [(name, 16) for name in COMPRESSORS] + [("csa", 1), ("hca_1", 4)]
)
def test_cuts_of_every_compressor(store, name, block_size):
    test_cuts_change_no_bit(store, name, block_size, ([14], [1] * 14, [3, 10, 1]))


@nightly
@pytest.mark.parametrize("name", ["csa", "hca", "csa_odd"])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_chunking_of_any_batch(store, name, data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    block_size, rows = data.draw(st.sampled_from([1, 4, 5, 16])), data.draw(st.sampled_from([1, 2, 5]))
    paged = Paged(
        store, COMPRESSORS[name], lengths, block_size, rows=rows, seed=data.draw(st.integers(0, 99))
    )
    while paged.done != lengths:
        left = [n - d for n, d in zip(lengths, paged.done)]
        new = [data.draw(st.one_of(st.just(min(1, n)), st.integers(0, n))) for n in left]
        paged.step(new, padding=data.draw(st.integers(0, 3)))
        check(paged)


@pytest.mark.parametrize("name", ["csa", "hca"])
def test_a_batch_of_requests(store, name):
    """Prompts, chunks and single tokens side by side, padding behind them; null blocks are not written."""
    unwanted = {"unwanted": lambda r, i: r == 0 and i == 1, "unwanted_entries": lambda r, i: i == r}
    paged = Paged(store, COMPRESSORS[name], [30, 9, 13, 1], 8, rows=2, seed=3, **unwanted)
    for new in ([19, 8, 0, 1], [1, 1, 10, 0], [10, 0, 3, 0]):
        paged.step(new, padding=3)
        check(paged)


def test_windows_longer_than_a_block(store):
    paged = Paged(store, COMPRESSORS["hca_128"], [140], 48, rows=2)
    for new in (127, 1, 12):
        paged.step([new])
    check(paged)


def test_weights_that_vanish(store):
    """Gates of -inf weigh nothing, also as the first of a window; enormous ones overflow nothing."""
    paged = Paged(store, Compressor(4, True, width=16), [20], 8)
    gate = paged.tokens[0][1]
    gate[::4], gate[3], gate[17], gate[18] = -float("inf"), 3e38, -3e38, 1e30
    paged.run_in_chunks(13)
    assert_close(paged.stored(0), paged.expected_entries(0))


@pytest.mark.parametrize(
    ("layout", "rope_dim"),
    [("fp8_v4", 16), ("fp8_v4", 0), ("fp8_v32", 0), ("fp8_index", 0), ("fp4_index", 0)],
)
def test_layouts_hold_the_plain_entries(store, layout, rope_dim):
    """What is stored has the bytes that the plain float32 entries are quantised to."""
    c = replace(COMPRESSORS["csa_128"], width=128 + rope_dim, pairs=8)
    plain, paged = Paged(store, c, [8], 8), Paged(store, c, [8], 8, layout=layout, rope_dim=rope_dim)
    expected, expected_cache = paged._entry_cache(len(paged.entries), None)
    for p in (plain, paged):
        p.step([5])
        p.step([3], padding=1)
    slots = (~plain.entries[..., 0].flatten().isnan()).nonzero().flatten()
    store_rows(plain.entries.flatten(0, 1)[slots], expected_cache, slots, layout, rope_dim)
    assert len(slots) == 2 and torch.equal(paged.entry_arena, expected)
    assert torch.equal(paged.states.nan_to_num(7.0), plain.states.nan_to_num(7.0))


def test_types(store):
    types = (torch.float32, torch.bfloat16, torch.float16)
    compressors = Compressor(4, True), Compressor(8, False, width=19, pairs=3), Compressor(4, True)
    for c, dtype, bias_dtype, cache_dtype in zip(
        compressors, types, (torch.float32, torch.float32, torch.float16), types[1:] + types[:1]
    ):
        c = replace(c, dtype=dtype, bias_dtype=bias_dtype)
        paged = Paged(store, c, [9], 8, cache_dtype=cache_dtype)
        paged.step([6])
        paged.step([3])
        check(paged)


def test_far_positions_are_rotated_as_near_ones(store):
    """Angles of a million radians, from a state that is given."""
    c = Compressor(4, False, width=64, pairs=32)
    generator = torch.Generator().manual_seed(0)
    (kv, gate), end = c.tokens(4, generator), 1_000_004
    states, entries = torch.zeros(3, 1, 3, 64), torch.zeros(2, 4, 64)
    table, entry_table = torch.full((1, 2), 2, dtype=torch.int32), torch.zeros(1, 62_501, dtype=torch.int32)
    entry_table[0, -1] = 1
    step = (torch.tensor([end], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32))
    caches = (states, table, entries, entry_table)
    theirs = entries.clone()
    store(kv, gate, *c.weights, *caches, *step, **c.options, block_size=1 << 20)
    torch.ops.pagebinder.compress_norm_rope_store(
        kv, gate, *c.weights, states, table, theirs, entry_table, *step, **c.options, block_size=1 << 20
    )
    assert theirs[1, 0].any()
    torch.testing.assert_close(entries, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("message", "change"), [bad for bad in BAD if not any(part in bad[0] for part in ON_DEVICE)]
)
def test_bad_shapes_and_dtypes_raise(store, message, change):
    arguments = operands() | OPTIONS | change
    values = [arguments.pop(name) for name in NAMES]
    with pytest.raises((ValueError, RuntimeError), match=message):
        store(*values, **arguments)


def test_what_is_out_of_range_is_not_written(store):
    for change in ({"state_table": 7}, {"entry_table": 7}, {"entry_table": -1}, {"seq_lens": 99}):
        values = operands()
        kept = values["state_cache"].clone(), values["entry_cache"].clone()
        for name, value in change.items():
            values[name] = torch.full_like(values[name], value)
        store(*values.values(), **OPTIONS)
        assert "entry_table" not in change or torch.equal(values["entry_cache"], kept[1])
        assert "state_table" not in change or torch.equal(values["state_cache"], kept[0])


def test_opcheck(provider, store):
    moved = tuple(x.to(DEVICE) for x in operands().values())
    op = torch.ops.pagebinder_triton.compress_norm_rope_store
    torch.library.opcheck(op, moved, OPTIONS, test_utils=OF_A_KERNEL)
