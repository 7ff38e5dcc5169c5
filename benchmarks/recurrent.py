"""Recurrences over paged states: the C++ kernels against the references, decodes and a prefill.

    python benchmarks/recurrent.py [--threads 1 2] [--rounds 7] [--only ssd] [--compiled]
                                   [--cpu-time] [--output FILE]

Sizes are those of one layer of a known model. Calls take turns between states that lie in as much memory as a model's
(`FOOTPRINT_BYTES`), so that a decode finds none of them in a cache. Every case runs in turn, round after round:
`reference` (plain PyTorch), `compiled` (with --compiled: the reference's scan of one token between a gather and a
scatter of states, by inductor) and `cpu`. Ratios are medians over rounds of the ratio within a round. `state_gb_s`
counts each state once read and once written; beside it is what memory gives in the same minute for reading, and for
reading and writing in place. All but `cpu` are sampled in the first rounds only, because they are slow. --cpu-time
counts the seconds of the process instead of the clock's: for one thread on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import machine

from pagebinder.custom_ops.cpu import compiler
from pagebinder.custom_ops.library import op_info
from pagebinder.custom_ops.providers import OpNeed, select_provider

FOOTPRINT_BYTES = 512 << 20
BLOCK_TOKENS = 256
CONTEXT = 1000
SAMPLE_SECONDS, REFERENCE_ROUNDS = 0.05, 3
RESULTS = Path(__file__).parent / "results" / "recurrent_cpu.json"


@dataclass(frozen=True)
class Layer:
    """tokens(T) and weights() -> operands; `order` puts them into the op's order."""

    op: str
    model: str
    state: tuple[int, ...]
    tokens: Callable
    options: dict
    weights: Callable = tuple
    order: tuple[int, ...] | None = None
    state_dtype: torch.dtype = torch.float32

    @property
    def state_bytes(self) -> int:
        return torch.Size(self.state).numel() * self.state_dtype.itemsize


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def decays(*shape: int) -> torch.Tensor:
    return -0.1 * torch.rand(shape)


def delta_tokens(keys: int, heads: int, width: int, row_decay: bool) -> Callable:
    gate = (width,) if row_decay else ()
    return lambda t: (
        bf16(t, keys, width), bf16(t, keys, width), bf16(t, heads, width), decays(t, heads, *gate),
        torch.rand(t, heads).bfloat16(),
    )  # fmt: skip


DELTA = {"scale": 128**-0.5, "l2norm_eps": 1e-6}
LAYERS = {
    "short_conv": Layer(
        "paged_short_conv", "Qwen3-Next", (8192, 3), lambda t: (bf16(t, 8192),), {"activation": "silu"},
        lambda: (bf16(8192, 4), None), state_dtype=torch.bfloat16,
    ),
    "gated_delta_rule": Layer(
        "paged_gated_delta_rule", "Qwen3-Next", (32, 128, 128), delta_tokens(16, 32, 128, False), DELTA
    ),
    "gated_delta_rule of rows": Layer(
        "paged_gated_delta_rule", "Kimi Linear", (32, 128, 128), delta_tokens(32, 32, 128, True), DELTA
    ),
    "ssd": Layer(
        "paged_ssd", "Mamba-2, 64 heads of 64", (64, 64, 128),
        lambda t: (bf16(t, 64, 64), bf16(t, 64), bf16(t, 8, 128), bf16(t, 8, 128)), {"dt_softplus": True},
        lambda: (-torch.rand(64), torch.randn(64), torch.randn(64) - 3), (0, 1, 4, 2, 3, 5, 6),
    ),
    "selective_scan": Layer(
        "paged_selective_scan", "Mamba 2.8B", (5120, 16),
        lambda t: (bf16(t, 5120), bf16(t, 5120), bf16(t, 16), bf16(t, 16)), {"dt_softplus": True},
        lambda: (-torch.rand(5120, 16), torch.randn(5120), torch.randn(5120) - 3),
    ),
    "linear_recurrence": Layer(
        "paged_linear_recurrence", "RecurrentGemma 2B", (2560,), lambda t: (bf16(t, 2560), torch.rand(t, 2560)), {}
    ),
    "wkv": Layer(
        "paged_wkv", "RWKV-4 7B", (3, 4096), lambda t: (bf16(t, 4096), bf16(t, 4096)), {},
        lambda: (-torch.rand(4096), torch.randn(4096)),
    ),
    "mlstm": Layer(
        "paged_mlstm", "xLSTM 7B", (8, 257, 513),
        lambda t: (bf16(t, 8, 256), bf16(t, 8, 256), bf16(t, 8, 512), bf16(t, 8), bf16(t, 8) + 3),
        {"scale": 256**-0.5, "eps": 1e-6},
    ),
}  # fmt: skip
WORKLOADS = {
    "decode of 1": (1, 1),
    "decode of 32": (32, 1),
    "prefill of 1024": (1, 1024),
}  # requests, tokens of each


def cases(layer: Layer, requests: int, new: int, compiled: bool) -> dict[str, Callable]:
    """name -> a call of the op; successive calls take other blocks."""
    per_request = 1 if new == 1 else new // BLOCK_TOKENS
    layers = max(1, FOOTPRINT_BYTES // (requests * per_request * layer.state_bytes))
    cache = torch.zeros((1 + layers * requests * per_request, *layer.state), dtype=layer.state_dtype)
    ids = 1 + torch.arange(layers * requests * per_request, dtype=torch.int32).view(
        layers, requests, per_request
    )
    tables = ids if new > 1 else ids.expand(-1, -1, -(-CONTEXT // BLOCK_TOKENS)).contiguous()
    lens = torch.full((requests,), new if new > 1 else CONTEXT, dtype=torch.int32)
    starts = torch.arange(requests + 1, dtype=torch.int32) * new
    both = (*layer.tokens(requests * new), *layer.weights())
    operands = tuple(both[i] for i in layer.order or range(len(both)))
    turn = iter(range(1 << 60))

    def call(overload):
        table = tables[next(turn) % layers]
        return overload(*operands, cache, table, lens, starts, block_size=BLOCK_TOKENS, **layer.options)

    kernel, reference = select_provider(OpNeed(op=layer.op), "cpu").overload, op_info(layer.op).overload
    calls = {"cpu": lambda: call(kernel), "reference": lambda: call(reference)}
    if compiled and new == 1 and layer.op in SCANS:
        step = torch.compile(SCANS[layer.op](layer, operands))
        calls["compiled"] = lambda: step(cache, tables[next(turn) % layers, :, 0].long())
    return calls


def delta_step(layer: Layer, operands: tuple) -> Callable:
    from pagebinder.custom_ops.recurrent.gated_delta_rule import delta_scan

    def step(cache, blocks):
        out, cache[blocks] = delta_scan(cache[blocks], *(x[:, None] for x in operands), **layer.options)
        return out

    return step


def ssd_step(layer: Layer, operands: tuple) -> Callable:
    from pagebinder.custom_ops.recurrent.ssd import ssd_scan

    x, dt, A, B, C, D, dt_bias = operands
    weights = {"A": A, "D": D, "dt_bias": dt_bias, "dt_min": 0.0, "dt_max": None, **layer.options}

    def step(cache, blocks):
        out, cache[blocks] = ssd_scan(cache[blocks], *(o[:, None] for o in (x, dt, B, C)), **weights)
        return out

    return step


SCANS = {"paged_gated_delta_rule": delta_step, "paged_ssd": ssd_step}


def seconds_per_call(call: Callable, clock: Callable[[], float]) -> float:
    """One sample: repeats the call until SAMPLE_SECONDS have passed."""
    started, calls = clock(), 0
    while True:
        call()
        calls += 1
        elapsed = clock() - started
        if elapsed > SAMPLE_SECONDS:
            return elapsed / calls


def measure(name: str, workload: str, options: argparse.Namespace) -> dict:
    layer, (requests, new) = LAYERS[name], WORKLOADS[workload]
    calls = cases(layer, requests, new, options.compiled)
    samples = {case: [] for case in calls}
    for call in calls.values():
        call()
    for i in range(options.rounds):
        for case, call in calls.items():
            if case == "cpu" or i < REFERENCE_ROUNDS:
                samples[case].append(seconds_per_call(call, options.clock))
    result = {"op": name, "model": layer.model, "workload": workload}
    result["median_ms"] = {case: round(statistics.median(s) * 1e3, 4) for case, s in samples.items()}
    result["best_cpu_ms"] = round(min(samples["cpu"]) * 1e3, 4)
    for case in samples.keys() - {"cpu"}:
        result[f"{case}_over_cpu"] = round(
            statistics.median(x / y for x, y in zip(samples[case], samples["cpu"])), 2
        )
    if new == 1:
        moved = 2 * requests * layer.state_bytes
        result["state_gb_s"] = round(moved / min(samples["cpu"]) / 1e9, 2)
        result |= memory_rates(options.clock)
    return result


def memory_rates(clock: Callable[[], float]) -> dict[str, float]:
    """GB/s of reading, and of reading and writing in place, over as much memory as the states take."""
    values = torch.zeros(FOOTPRINT_BYTES // 4)
    read = min(seconds_per_call(values.sum, clock) for _ in range(3))
    update = min(seconds_per_call(lambda: values.mul_(0.5), clock) for _ in range(3))
    return {
        "memory_read_gb_s": round(FOOTPRINT_BYTES / read / 1e9, 2),
        "memory_update_gb_s": round(2 * FOOTPRINT_BYTES / update / 1e9, 2),
    }


def run(threads: int, options: argparse.Namespace) -> dict:
    """All chosen workloads with a number of threads."""
    torch.set_num_threads(threads)
    report = {"threads": threads, "load_average": round(os.getloadavg()[0], 2), "results": []}
    print(f"{threads} threads, load average {report['load_average']}")
    for name in LAYERS:
        for workload in WORKLOADS:
            if options.only not in f"{name}, {workload}":
                continue
            result = measure(name, workload, options)
            report["results"].append(result)
            print(", ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--compiled", action="store_true", help="also compile the references of two decodes")
    parser.add_argument(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
        help="count the seconds of the process",
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    facts = {"compiler": compiler.version().splitlines()[0], "flags": " ".join(compiler.flags())}
    report = {"machine": machine() | facts, "rounds": options.rounds, "clock": options.clock.__name__}
    report["runs"] = [run(threads, options) for threads in options.threads]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
