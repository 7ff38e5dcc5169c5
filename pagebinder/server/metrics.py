"""GET /metrics: the engine's counters, and how long requests took, in Prometheus' format.

Dimensions are in the names, as Prometheus wants them: seconds, tokens; totals of counters end in _total.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagebinder.runtime.outputs import EngineStats, RequestOutput

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
GAUGES = {
    "running": "Requests that are computed.",
    "waiting": "Requests that wait for room.",
    "num_blocks": "Blocks of the KV cache.",
    "free_blocks": "Blocks that nobody holds.",
    "kv_usage": "Share of the KV cache that is in use.",
}
COUNTERS = {
    "steps": "Steps of the engine.",
    "generated_tokens": "Tokens that were generated.",
    "scheduled_tokens": "Tokens that were computed, of prompts, too.",
    "prefix_queried_tokens": "Prompt tokens that were looked for in the prefix cache.",
    "prefix_hit_tokens": "Prompt tokens that the prefix cache had.",
    "drafted_tokens": "Tokens that were guessed and checked.",
    "accepted_tokens": "Guessed tokens that were right.",
    "preemptions": "Requests that had to give back their blocks for a while.",
    "busy_seconds": "Time spent in steps.",
}


class Latencies:
    """When requests came, got their first token and ended; told by the engine's thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first_token = Histogram(
            "pagebinder_time_to_first_token_seconds", "From a request's arrival to its first token.",
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._whole = Histogram(
            "pagebinder_request_seconds", "From a request's arrival to its end.",
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._finished = Counter(
            "pagebinder_finished_requests", "Requests that ended.", ["reason"], registry=self.registry
        )
        self._arrivals: dict[str, float] = {}
        self._without_token: set[str] = set()

    def arrived(self, request_id: str) -> None:
        self._arrivals[request_id] = time.monotonic()
        self._without_token.add(request_id)

    def got(self, output: RequestOutput) -> None:
        arrival = self._arrivals.get(output.request_id)
        if arrival is None:
            return
        if output.request_id in self._without_token and output.num_tokens:
            self._without_token.discard(output.request_id)
            self._first_token.observe(time.monotonic() - arrival)
        if output.finished:
            self.forget(output.request_id)
            self._whole.observe(time.monotonic() - arrival)
            self._finished.labels(output.finish_reason).inc()

    def forget(self, request_id: str) -> None:
        self._arrivals.pop(request_id, None)
        self._without_token.discard(request_id)


class _Stats:
    """What a registry asks for."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"pagebinder_{name}", text, value=getattr(self._stats, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"pagebinder_{name}", text, value=getattr(self._stats, name))


def exposition(stats: EngineStats, latencies: Latencies) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Stats(stats))
    return generate_latest(registry) + generate_latest(latencies.registry)
