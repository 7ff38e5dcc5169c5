"""What an engine counts: the time of each part of a step, and everything `Engine.stats` reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pagebinder.runtime.outputs import EngineStats

if TYPE_CHECKING:
    from pagebinder.runtime.engine import Engine
    from pagebinder.runtime.graphs import StepGraphs

# "schedule" is all that the scheduler and the KV-cache managers do, with the results of the step, too. With a drafter
# there is "draft" besides.
STEP_PARTS = ("schedule", "plan", "run", "sample", "publish")


class StepClock:
    """Adds the time since the last lap to a named counter."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.last = time.perf_counter()

    def lap(self, name: str) -> float:
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        self.seconds[name] += seconds
        return seconds


def collect_stats(engine: Engine) -> EngineStats:
    """Counters since the start, and the present state. O(running requests)."""
    counters, busy = engine.scheduler.stats, sum(engine.loop.seconds.values())
    return EngineStats(
        running=engine.scheduler.num_running,
        waiting=engine.scheduler.num_waiting,
        num_blocks=engine.arena.num_blocks,
        free_blocks=engine.kv.num_free_blocks,
        kv_usage=engine.kv.usage,
        prefix_queried_tokens=counters.prefix_queried_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        preemptions=counters.num_preemptions,
        steps=counters.num_steps,
        scheduled_tokens=counters.num_scheduled_tokens,
        generated_tokens=engine.generated_tokens,
        busy_seconds=busy,
        tokens_per_second=engine.generated_tokens / busy if busy else 0.0,
        finished_requests=counters.num_finished,
        prefix_hit_rate=_share(counters.prefix_hit_tokens, counters.prefix_queried_tokens),
        resumed_hit_rate=_share(counters.resumed_hit_tokens, counters.resumed_queried_tokens),
        forks=counters.num_forks,
        copies=engine.loop.num_copies,
        swaps_out=counters.num_swaps_out,
        swaps_in=counters.num_swaps_in,
        encoder_runs=engine.loop.encoder.num_runs if engine.loop.encoder else 0,
        encoder_tokens=engine.loop.encoder.num_tokens if engine.loop.encoder else 0,
        deferred_blocks=engine.kv.num_deferred_blocks,
        cached_prefixes=engine.kv.pool.num_cached_prefixes,
        blocks_in_use=tuple(
            sum(len(table.blocks) - table.first_live for table in manager.tables.values())
            for manager in engine.kv.managers
        ),
        host_blocks=engine.host_blocks.num_slots if engine.host_blocks else 0,
        free_host_blocks=engine.host_blocks.num_free if engine.host_blocks else 0,
        copy_bytes_per_second=engine.swap_policy.copy_rate.per_second if engine.swap_policy else None,
        prefill_tokens_per_second=engine.swap_policy.compute_rate.per_second if engine.swap_policy else None,
        step_seconds=dict(engine.loop.seconds),
        cascaded_steps=engine.loop.cascade.stats.steps,
        cascade_saved_tokens=engine.loop.cascade.stats.saved_tokens,
        cascade_refusals=dict(engine.loop.cascade.stats.refused),
        ahead_steps=engine.loop.ahead.ahead,
        waited_steps=dict(engine.loop.ahead.waited),
        overshot_tokens=engine.loop.ahead.overshot_tokens,
        drafted_tokens=engine.loop.speculator.stats.drafted if engine.loop.speculator else 0,
        accepted_tokens=engine.loop.speculator.stats.accepted if engine.loop.speculator else 0,
        captured=engine.loop.captured.note,
        **_graph_stats(engine.loop.captured.graphs),
    )


def _graph_stats(graphs: StepGraphs | None) -> dict:
    if graphs is None:
        return {}
    stats = graphs.stats
    return {
        "graph_replays": dict(stats.replays),
        "uncaptured_steps": dict(stats.uncaptured),
        "padding_tokens": stats.padding_tokens,
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
