"""How fast this machine multiplies and copies, measured in a fraction of a second and remembered for the process.

Two numbers are enough to say which of the two binds an op: the rate of a large matrix product in the model's dtype,
and the rate at which memory is read and written by a copy that no cache holds. They are an upper bound of what a
kernel reaches; an op's time at these rates is a lower bound.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

PRODUCT_SIZE = {"cpu": 768, "cuda": 8192}
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
MEASURE_SECONDS = 0.15


@dataclass(frozen=True)
class Rates:
    """flops and bytes per second, and in words what was measured."""

    flops: float
    bytes: float
    what: str

    def seconds(self, flops: float, num_bytes: float) -> float:
        """The time that an op takes at least."""
        return max(flops / self.flops, num_bytes / self.bytes)

    def binds(self, flops: float, num_bytes: float) -> str:
        return "compute" if flops / self.flops > num_bytes / self.bytes else "memory"


@functools.cache
def measured_rates(device: str, dtype: str) -> Rates:
    """Rates of "cpu" or "cuda" for a dtype's name. For any other device, or a GPU that is not here, the CPU's."""
    kind = "cuda" if device.startswith("cuda") and torch.cuda.is_available() else "cpu"
    size, num_bytes = PRODUCT_SIZE[kind], COPY_BYTES[kind]
    a, b, out = (torch.ones(size, size, device=kind, dtype=getattr(torch, dtype)) for _ in range(3))
    source, target = (torch.ones(num_bytes // 4, device=kind) for _ in range(2))
    with torch.inference_mode():
        product = _best_seconds(lambda: torch.mm(a, b, out=out), kind)
        copy = _best_seconds(lambda: target.copy_(source), kind)
    threads = f", {torch.get_num_threads()} thread(s)" if kind == "cpu" else ""
    what = f"{size} x {size} {dtype} product and {num_bytes >> 20} MiB copy on this machine's {kind.upper()}{threads}"
    return Rates(2 * size**3 / product, 2 * num_bytes / copy, what)


def _best_seconds(run: Callable[[], object], kind: str) -> float:
    """The fastest of the calls that fit into MEASURE_SECONDS, at least two after a first one."""
    best, spent, calls = float("inf"), 0.0, 0
    while calls < 3 or spent < MEASURE_SECONDS:
        start = time.perf_counter()
        run()
        if kind == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        best, spent, calls = min(best, seconds) if calls else best, spent + seconds, calls + 1
    return best
