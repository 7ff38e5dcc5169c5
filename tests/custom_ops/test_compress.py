"""compress against its definition, and compress_norm_rope_store: cut and batched in any way, it stores the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagebinder.custom_ops.latent.layouts import PLAIN_DTYPES, store_rows
from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.errors import CompilerNotFoundError
from tests.custom_ops.compress_cases import Compressor, Paged
from tests.helpers import NIGHTLY
from tests.tolerances import assert_close

OPS = torch.ops.pagebinder
COMPRESSORS = {
    "csa": Compressor(4, True),
    "csa_128": Compressor(4, True, width=128, pairs=32, rope_scale=1.25),
    "csa_odd": Compressor(3, True, width=14, pairs=2),
    "hca": Compressor(8, False),
    "hca_128": Compressor(128, False, width=80, pairs=8),
    "hca_1": Compressor(1, False, width=16, pairs=8),
    "hca_sharp": Compressor(8, False, spread=200.0),
    "pool": Compressor(4, False, width=32, pairs=0, normed=False),
    "pool_rotated": Compressor(3, True, width=14, pairs=2, normed=False),
}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def store(request):
    chosen = registered_providers()[request.param]
    if isinstance(chosen.problem(), CompilerNotFoundError):
        pytest.skip(str(chosen.problem()))
    if reasons := chosen.reasons_against(OpNeed(op="compress_norm_rope_store")):
        pytest.skip(", ".join(reasons))
    chosen.prepare()
    return chosen.overload("compress_norm_rope_store")


def check(paged: Paged) -> None:
    """Entries and states are those of the definition, and nothing else has been written."""
    c = paged.compressor
    assert paged.entries[0].isnan().all() and paged.states[0].isnan().all(), "a null block was written"
    for r, (length, done) in enumerate(zip(paged.lengths, paged.done)):
        w = torch.arange(length // c.ratio)
        w = w[paged.entry_table[r, w // paged.rows] != 0]
        there = w < done // c.ratio
        assert_close(paged.stored(r, w[there]).to(paged.entries.dtype), paged.expected_entries(r)[w[there]])
        assert paged.stored(r, w[~there]).isnan().all(), "an entry was stored before its last token"
        for i in range(-(-length // paged.block_size)):
            block = int(paged.state_table[r, i])
            if block == 0:
                continue
            if i * paged.block_size >= done:
                assert paged.states[block].isnan().all(), "a state was written that was not reached"
            else:
                end = min((i + 1) * paged.block_size, done)
                assert_close(paged.states[block], paged.expected_state(r, end))


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 7, 8, 129, 300])
def test_semantic(name, dtype, num_tokens):
    c = replace(COMPRESSORS[name], dtype=dtype)
    kv, gate = c.tokens(num_tokens, torch.Generator().manual_seed(num_tokens))
    out = OPS.compress(kv, gate, *c.weights, **c.options)
    assert out.shape == (num_tokens, c.width) and out.dtype == dtype
    closing = (torch.arange(num_tokens) + 1) % c.ratio == 0
    assert_close(out[closing], c.entries(kv, gate))
    assert not out[~closing].any()


@pytest.mark.parametrize(
    ("name", "block_size"), [*((name, 16) for name in COMPRESSORS), ("csa", 100), ("hca", 100)]
)
def test_cuts_change_no_bit_and_agree_with_the_semantic_op(store, name, block_size):
    c, whole = COMPRESSORS[name], None
    for chunk in (300, 64, 16, 3, 1):
        paged = Paged(store, c, [300], block_size)
        paged.run_in_chunks(chunk)
        arrays = paged.entry_arena.nan_to_num(7.0), paged.states.nan_to_num(7.0)
        if whole is None:
            whole = arrays
            check(paged)
            kv, gate = paged.tokens[0]
            semantic = OPS.compress(kv, gate, *c.weights, **c.options)
            assert_close(paged.stored(0), semantic[c.ratio - 1 :: c.ratio])
        assert all(torch.equal(a, b) for a, b in zip(arrays, whole))


@pytest.mark.parametrize("name", ["csa", "hca", "csa_odd", "pool"])
@settings(max_examples=15 if NIGHTLY else 5, deadline=None)
@given(data=st.data())
def test_any_chunking_of_any_batch(store, name, data):
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    block_size, rows = data.draw(st.sampled_from([1, 4, 5, 16, 64])), data.draw(st.sampled_from([1, 2, 5]))
    seed = data.draw(st.integers(0, 99))
    paged = Paged(store, COMPRESSORS[name], lengths, block_size, rows=rows, seed=seed)
    while paged.done != lengths:
        left = [n - d for n, d in zip(lengths, paged.done)]
        new = [data.draw(st.one_of(st.just(min(1, n)), st.integers(0, n))) for n in left]
        paged.step(new, padding=data.draw(st.integers(0, 3)))
        check(paged)


@pytest.mark.parametrize("name", ["csa", "hca"])
def test_null_blocks_are_not_written(store, name):
    """Only some checkpoints and entry blocks are kept; steps end inside kept state blocks."""
    paged = Paged(
        store, COMPRESSORS[name], [100, 90], 8, rows=2,
        unwanted=lambda r, i: i not in (2, 5, 8, 11, 12), unwanted_entries=lambda r, i: i % 3 == r,
    )  # fmt: skip
    for new in ([24, 20], [20, 21], [1, 1], [55, 48]):
        paged.step(new, padding=2)
        check(paged)


@pytest.mark.parametrize("name", ["csa", "hca", "hca_128"])
def test_a_prefix_is_resumed_from_its_checkpoint(store, name):
    """Request 1 takes over blocks of request 0 and goes on with tokens of its own; request 0's blocks stay."""
    c, size = COMPRESSORS[name], 16
    paged = Paged(store, c, [300, 300], size, rows=128 // c.ratio)
    paged.step([300, 0])
    kept = paged.states[paged.state_table[0, :19].long()].clone()
    shared = 256
    for both in paged.tokens[1:]:
        for x, prefix in zip(both, paged.tokens[0]):
            x[:shared] = prefix[:shared]
    paged.state_table[1, : shared // size] = 0
    paged.state_table[1, shared // size - 1] = paged.state_table[0, shared // size - 1]
    paged.entry_table[1, :2] = paged.entry_table[0, :2]
    paged.done[1] = shared
    paged.step([0, 5])
    paged.step([0, 39])
    check(paged)
    assert torch.equal(paged.states[paged.state_table[0, :19].long()], kept)


@pytest.mark.parametrize("name", ["csa_128", "hca_128"])
@pytest.mark.parametrize(
    ("layout", "rope_dim"),
    [("fp8_v4", 16), ("fp8_v4", 0), ("fp8_v32", 0), ("fp8_index", 0), ("fp4_index", 0)],
)
def test_layouts_hold_the_plain_entries(store, name, layout, rope_dim):
    """What is stored has the bytes that the plain float32 entries are quantised to."""
    c = replace(COMPRESSORS[name], width=128 + rope_dim, pairs=8)
    plain = Paged(store, c, [300, 70], 64)
    paged = Paged(store, c, [300, 70], 64, layout=layout, rope_dim=rope_dim)
    expected, expected_cache = paged._entry_cache(len(paged.entries), None)
    for p in (plain, paged):
        p.step([131, 0])
        p.step([1, 64])
        p.step([168, 6], padding=1)
    slots = (~plain.entries[..., 0].flatten().isnan()).nonzero().flatten()
    store_rows(plain.entries.flatten(0, 1)[slots], expected_cache, slots, layout, rope_dim)
    assert len(slots) == 300 // c.ratio + 70 // c.ratio and torch.equal(paged.entry_arena, expected)
    assert torch.equal(paged.states.nan_to_num(7.0), plain.states.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
@pytest.mark.parametrize("bias_dtype", ["float32", "same"])
@pytest.mark.parametrize("cache_dtype", PLAIN_DTYPES)
def test_types(store, dtype, bias_dtype, cache_dtype):
    bias = torch.float32 if bias_dtype == "float32" else dtype
    for c in (
        Compressor(4, True, dtype=dtype, bias_dtype=bias),
        Compressor(8, False, width=19, pairs=3, dtype=dtype),
    ):
        paged = Paged(store, c, [70, 20], 16, cache_dtype=cache_dtype)
        for new in ([33, 5], [1, 1], [36, 14]):
            paged.step(new)
            check(paged)


def test_weights_that_vanish(store):
    """Gates of -inf weigh nothing, also as the first of a window; enormous ones overflow nothing."""
    for c in (Compressor(4, True, width=16), Compressor(8, False, width=16)):
        paged = Paged(store, c, [40], 16)
        gate = paged.tokens[0][1]
        gate[::4], gate[3], gate[17], gate[18] = -float("inf"), 3e38, -3e38, 1e30
        paged.run_in_chunks(13)
        assert_close(paged.stored(0), paged.expected_entries(0))


def test_nan_stays_with_its_entries(store):
    paged = Paged(store, COMPRESSORS["csa"], [40], 16)
    paged.tokens[0][0][9, 24] = float("nan")  # a b half: entry 2 alone
    paged.tokens[0][1][21, 3] = float("nan")  # an a half: entry 6
    paged.run_in_chunks(40)
    assert paged.stored(0).isnan().any(1).nonzero().flatten().tolist() == [2, 6]


def test_any_number_of_threads_gives_the_same_bits(store):
    c, results, threads = Compressor(4, True, width=256, pairs=32), [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            paged = Paged(store, c, [700, 333, 1], 48, rows=16)
            for new in ([301, 1, 1], [399, 332, 0]):  # the first request goes on inside a block
                paged.step(new)
            results.append((paged.entry_arena.nan_to_num(7.0), paged.states.nan_to_num(7.0)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results))
    check(paged)
