"""Preempted requests that wait in host memory: the same tokens, nothing computed twice."""

from __future__ import annotations

import pytest

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.errors import CacheCapacityError, ConfigError
from tests.helpers import VOCAB_SIZE, tiny_llama, tiny_mistral

pytestmark = pytest.mark.usefixtures("captured_once")

MODELS = {"llama": tiny_llama, "mistral-window": lambda: tiny_mistral(20)}
PROMPTS = [[(7 * i + j) % VOCAB_SIZE for j in range(5 + 9 * i)] for i in range(6)]


@pytest.fixture(scope="module", params=MODELS)
def compiled(request):
    return pagebinder.compile_model(MODELS[request.param](), CompileConfig(executable="eager", block_size=16))


def serve(compiled, **options):
    engine = compiled.engine(
        EngineConfig(**{"max_num_batched_tokens": 16, "check_integrity": True, **options})
    )
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3)
    return engine, [o.token_ids for o in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("retention", ["dense", "sparse", 32])
def test_swapping_changes_no_token(compiled, caching, retention):
    _, expected = serve(compiled, num_kv_blocks=200)
    engine, tokens = serve(
        compiled, num_kv_blocks=12, prefix_caching=caching, prefix_retention=retention, swap_bytes=1 << 22,
        swap_policy="always",
    )  # fmt: skip
    stats = engine.stats()
    assert tokens == expected
    assert stats.swaps_out == stats.swaps_in == stats.preemptions > 0
    assert stats.free_host_blocks == stats.host_blocks > 0 and stats.free_blocks == stats.num_blocks - 1
    if not caching:
        computed = sum(len(p) + 39 for p in PROMPTS)
        assert stats.scheduled_tokens == computed  # nothing was computed twice


def test_host_slots_may_lie_in_several_pieces(compiled, monkeypatch):
    monkeypatch.setattr("pagebinder.runtime.arena.HOST_BYTES", 3 * compiled.kv_spec.bytes_per_block)
    _, expected = serve(compiled, num_kv_blocks=200)
    swap = {"swap_bytes": 10 * compiled.kv_spec.bytes_per_block, "swap_policy": "always"}
    engine, tokens = serve(compiled, num_kv_blocks=12, prefix_caching=False, **swap)
    assert tokens == expected and engine.stats().swaps_in > 0
    assert [len(piece) for piece in engine.arena._host] == [3, 3, 3, 1]


def test_rates_are_measured(compiled):
    engine, _ = serve(compiled, num_kv_blocks=12, swap_bytes=1 << 22)
    stats = engine.stats()
    assert stats.copy_bytes_per_second > 0 and stats.prefill_tokens_per_second > 0


@pytest.mark.parametrize(("copy_rate", "swapped"), [(1e15, True), (1.0, False)])
def test_auto_follows_the_rates(compiled, copy_rate, swapped, monkeypatch):
    monkeypatch.setattr("pagebinder.runtime.engine.KVArena.time_copies", lambda self: (copy_rate, 1.0))
    monkeypatch.setattr("pagebinder.runtime.swap_policy.SwapPolicy.note_prefill", _fixed_prefill_rate)
    _, expected = serve(compiled, num_kv_blocks=200)
    engine, tokens = serve(compiled, num_kv_blocks=12, prefix_caching=False, swap_bytes=1 << 22)
    stats = engine.stats()
    assert tokens == expected and stats.preemptions > 0
    assert (stats.swaps_out > 0) == swapped


def _fixed_prefill_rate(policy, num_tokens, seconds):
    policy.compute_rate.add(1000, 1.0)


def test_no_swap_space_without_bytes_or_with_never(compiled):
    for options in ({}, {"swap_bytes": 1 << 22, "swap_policy": "never"}):
        engine, _ = serve(compiled, num_kv_blocks=12, **options)
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.swaps_out == stats.host_blocks == 0
        assert stats.copy_bytes_per_second is None


@pytest.mark.parametrize(
    "bad",
    [
        {"swap_bytes": -1},
        {"swap_policy": "often"},
        {"swap_policy": "always"},
        {"prefix_retention": "some"},
        {"prefix_retention": 0},
    ],
)
def test_bad_options(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        EngineConfig(**bad)


@pytest.mark.parametrize("swap_bytes", [1, 10**16])
def test_swap_space_that_is_useless_or_cannot_be_had(compiled, swap_bytes):
    with pytest.raises(CacheCapacityError, match="swap_bytes"):
        compiled.engine(EngineConfig(num_kv_blocks=12, swap_bytes=swap_bytes))
