"""Timing on a GPU: medians of CUDA-graph replays over inputs that do not fit its cache, and measured ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from gpu_isolated import error_row

from pagebinder.runtime.graphs.cuda_backend import leave_capture_of_random_numbers

WARM_MS = 30.0  # of replays before the first that counts: clocks rise with work
REPLAY_MS = 1.5  # of one replay at least, or the launch of the graph would be much of what is measured
MAX_CALLS = 400  # in one graph
SAMPLES, ENOUGH_SAMPLES, MAX_MS = 25, 5, 1000.0
L2_BYTES = 64 << 20

Calls = Sequence[Callable[[], object]]


def median_ms(calls: Calls) -> float:
    """Milliseconds of one call: all of them captured in one graph, so that launches cost no time of the host.

    Give several calls over different tensors where one call's data would stay in the cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(calls, 1)  # kernels are compiled
    torch.cuda.current_stream().wait_stream(stream)
    graph = _captured(calls, 1)
    graph.replay()
    once = _elapsed_ms(graph.replay)
    repeats = max(1, min(round(REPLAY_MS / once), MAX_CALLS // len(calls)))
    graph = _captured(calls, repeats)
    spent = 0.0
    while spent < WARM_MS:
        spent += _elapsed_ms(graph.replay)
    samples: list[float] = []
    while len(samples) < SAMPLES and (len(samples) < ENOUGH_SAMPLES or sum(samples) < MAX_MS):
        samples.append(_elapsed_ms(graph.replay))
    return statistics.median(samples) / len(calls) / repeats


def _run(calls: Calls, repeats: int) -> None:
    for _ in range(repeats):
        for call in calls:
            call()  # nothing is kept: what the next call returns takes the memory of this one's


def _elapsed_ms(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _captured(calls: Calls, repeats: int) -> torch.cuda.CUDAGraph:
    graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            _run(calls, repeats)
    except BaseException:
        leave_capture_of_random_numbers(torch.cuda.current_device())
        raise
    finally:
        torch.cuda.set_stream(caller)  # a capture that fails leaves its own stream behind
    return graph


def bandwidth_row(case: str, num_bytes: int, calls: Calls, copy_gb_per_s: float, **sizes) -> dict:
    """A row of the report. `num_bytes`: that one call has to move. Only what all calls together cannot find in the
    cache stands beside the rate of a copy."""
    ms = median_ms(calls)
    rate = num_bytes / ms / 1e6
    in_cache = num_bytes * len(calls) < 2 * L2_BYTES
    return {
        "case": case, **sizes, "ms": ms, "gb_per_s": rate,
        "share_of_copy": None if in_cache else rate / copy_gb_per_s,
    }  # fmt: skip


def num_copies(num_bytes: int, most: int = 9) -> int:
    """Of the tensors of a call that moves so many bytes: enough to miss the cache, if so many can be had."""
    return 1 + min(most - 1, 2 * L2_BYTES // num_bytes)


def attempted(case: str, measure: Callable[[], dict]) -> dict:
    """A row, or one that says what went wrong: the rows beside it are worth having."""
    try:
        return measure()
    except Exception as error:
        return error_row(case, error)


def kernel_us(run: Callable[[], object], repeats: int = 5, shown: int = 16) -> dict[str, list[float]]:
    """What a call launches, of the longest: kernel -> [launches, microseconds] of one call."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda event: -event.device_time_total)
    return {
        event.key[:90]: [event.count / repeats, event.device_time_total / repeats] for event in events[:shown]
    }


def copy_gb_per_s(num_bytes: int = 4 << 30) -> float:
    """Rate of a large device-to-device copy, bytes read plus bytes written: the faster of the driver's copy (which is
    slow as a node of a graph) and of a kernel that reads and writes."""
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return max(2 * num_bytes / median_ms([copy]) / 1e6 for copy in copies)


def matmul_tflop_per_s(size: int = 8192) -> float:
    """Rate of a square bf16 matrix product on random data."""
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device="cuda").unbind(0)
    return 2 * size**3 / median_ms([lambda: a @ b]) / 1e9
