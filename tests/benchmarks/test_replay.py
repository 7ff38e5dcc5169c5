"""The replay of a trace: everybody is answered as scripted, forks share memory, goals are judged as they say."""

import sys

import pytest

from pagebinder.runtime.kv import PrefixRetention, plan_kv_cache
from tests.benchmarks.test_traces import BENCHMARKS


@pytest.fixture(scope="module")
def modules():
    """The benchmark's modules import each other by plain names."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import kv_targets
        import layer_mixes
        import replay
        import traces

        yield {"replay": replay, "traces": traces, "mixes": layer_mixes.MIXES, "goal": kv_targets.goal}
    finally:
        sys.path.remove(str(BENCHMARKS))


def small_trace(traces, seed=0):
    shape = traces.TraceShape(
        num_chats=4, num_documents=1, num_sampled=2, message=(5, 30), answer=(5, 30), document=(300, 600),
        sampled_prompt=(40, 90), pause=(2, 10),
    )  # fmt: skip
    return traces.generate_trace(seed, shape)


def run(modules, mix, trace, *, num_blocks=4000, retention=None):
    plan = plan_kv_cache(modules["mixes"][mix](), block_size=16, max_model_len=2048)
    setup = modules["replay"].CacheSetup(
        plan=plan, num_blocks=num_blocks, max_model_len=2048, retention=retention
    )
    replay = modules["replay"].Replay(setup)
    replay.run(trace)
    replay.scheduler.check_integrity()
    return replay


@pytest.mark.parametrize("mix", ["full", "full + window", "full + recurrent"])
def test_every_sample_of_every_request_is_answered(modules, mix):
    trace = small_trace(modules["traces"])
    replay = run(modules, mix, trace, retention=PrefixRetention.sparse())
    stats = replay.scheduler.stats
    assert stats.num_finished == sum(len(request.answers) for request in trace)
    assert stats.num_forks == sum(len(request.answers) - 1 for request in trace) > 0
    assert not replay.scheduler.has_unfinished
    assert replay.log.hit_rate > 0.3


def test_a_replay_is_reproducible(modules):
    logs = [run(modules, "full", small_trace(modules["traces"], seed=5)).log for _ in range(2)]
    first, second = ([(s.in_use, s.cached, s.running, s.scheduled_tokens) for s in log.steps] for log in logs)
    assert first == second


def test_prefix_caching_saves_tokens_and_small_pools_preempt(modules):
    trace = small_trace(modules["traces"])
    off = run(modules, "full", trace).log
    dense = run(modules, "full", trace, retention=PrefixRetention.dense()).log
    tight = run(modules, "full", trace, num_blocks=80, retention=PrefixRetention.dense()).log
    assert dense.total("scheduled_tokens") < 0.8 * off.total("scheduled_tokens")
    assert off.total("hit_tokens") == off.total("preemptions") == dense.total("preemptions") == 0
    assert tight.total("preemptions") > 0 < tight.total("evictions")
    assert max(s.num_blocks_in_use for s in tight.steps) <= 79


def test_goals_are_judged_in_their_direction(modules):
    goal = modules["goal"]
    assert goal("a", 7.9, 7.5)["pass"]
    assert not goal("a", 7.4, 7.5)["pass"]
    assert goal("b", 0.03, 0.04, at_most=True)["pass"]
    assert not goal("b", 0.05, 0.04, at_most=True)["pass"]
