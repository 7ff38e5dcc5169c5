"""Timing on a GPU: medians of CUDA-graph replays over inputs that do not fit its cache, and measured ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

WARMUPS = 3
REPLAYS = 25


def median_ms(calls: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of one call: all of them captured in one graph, so that launches cost no time of the host.

    Give several calls over different tensors where one call's data would stay in the cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(WARMUPS):
        graph.replay()
    samples = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / len(calls))
    return statistics.median(samples)


def copy_gb_per_s(num_bytes: int = 4 << 30) -> float:
    """Rate of a large device-to-device copy: bytes read plus bytes written."""
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * num_bytes / median_ms([lambda: target.copy_(source)]) / 1e6


def matmul_tflop_per_s(size: int = 8192) -> float:
    """Rate of a square bf16 matrix product on random data."""
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device="cuda").unbind(0)
    return 2 * size**3 / median_ms([lambda: a @ b]) / 1e9
