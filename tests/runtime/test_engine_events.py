"""`engine.record_events()`: the log agrees with the engine's own counters, step by step."""

import pytest

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams
from pagebinder.runtime.kv import KVEventLog, draw_pool
from tests.helpers import tiny_mistral


@pytest.fixture(scope="module")
def compiled():
    model = tiny_mistral(window=48)
    return pagebinder.compile_model(model, CompileConfig(executable="eager", block_size=16))


def test_the_log_of_a_run_agrees_with_the_engine(compiled, tmp_path):
    engine = compiled.engine(EngineConfig(num_kv_blocks=24, max_num_batched_tokens=32, check_integrity=True))
    log = engine.record_events()
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=1, n=2)
    prompts = [[1, 2, 3, 4] * 10 + [i] for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, params)
    while engine.has_unfinished:
        used_before = len(log.steps)
        engine.step()
        assert len(log.steps) == used_before + 1
    stats = engine.stats()
    assert len(log.steps) == stats.steps
    assert log.bytes_per_block == engine.arena.bytes_per_block
    for name, counter in {
        "scheduled_tokens": stats.scheduled_tokens,
        "queried_tokens": stats.prefix_queried_tokens,
        "hit_tokens": stats.prefix_hit_tokens,
        "preemptions": stats.preemptions,
        "swaps_out": stats.swaps_out,
    }.items():
        assert log.total(name) == counter, name
    assert max(step.running for step in log.steps) > 1
    log.save(tmp_path / "run.jsonl")
    draw_pool(KVEventLog.load(tmp_path / "run.jsonl"), tmp_path / "run.svg")
    assert (tmp_path / "run.svg").stat().st_size > 10_000


def test_recording_changes_no_token_and_is_asked_for_once(compiled):
    params = SamplingParams(max_tokens=12, temperature=0.0)
    plain, watched = (compiled.engine(EngineConfig(num_kv_blocks=24)) for _ in range(2))
    log = watched.record_events()
    prompts = [[5, 6, 7] * 9, [5, 6, 7] * 9 + [8]]
    assert [o.token_ids for o in watched.generate(prompts, params)] == [
        o.token_ids for o in plain.generate(prompts, params)
    ]
    assert watched.record_events() is log
    assert len(log.steps) == watched.stats().steps > 0
