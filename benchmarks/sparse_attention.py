"""Sparse attention over latent rows and its indexer: the C++ kernels against the references, by context.

    python benchmarks/sparse_attention.py [--threads 1 2] [--contexts 8192 65536] [--rounds 9] [--only decode]
                                          [--output FILE]

The sizes are those of one DeepSeek-V4 layer: 64 heads of 512 over a window of 128 tokens and 512 selected entries of
4 tokens each, an indexer with 64 heads of 128. Every case runs in turn, round after round: `reference` (plain
PyTorch, over all visible entries), `gathered` (what PyTorch can do at best for a decode: fetch the rows that are
attended to, then matrix products) and `cpu`. Ratios are medians over rounds of the ratio within a round. A decode
should take the same time at every context; `flat` compares the longest with the shortest. All but `cpu` are sampled
in the first rounds only, because they are slow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import machine

from pagebinder.custom_ops.cpu import compiler
from pagebinder.custom_ops.latent.layouts import load_rows, row_layout, rows_per_block, store_rows
from pagebinder.custom_ops.providers import OpNeed, select_provider
from pagebinder.custom_ops.sparse.indexer import INDEXER_SCORE_TOPK
from pagebinder.custom_ops.sparse.sparse_mla import SPARSE_MLA_ATTENTION

HEADS, WIDTH, ROPE, WINDOW, TOPK, RATIO, DENSE_RATIO = 64, 512, 64, 128, 512, 4, 128
INDEX_HEADS, INDEX_WIDTH = 64, 128
BLOCK_TOKENS = 256
SAMPLE_SECONDS, REFERENCE_ROUNDS = 0.02, 3
RESULTS = Path(__file__).parent / "results" / "sparse_attention_cpu.json"


@dataclass(frozen=True)
class Workload:
    """One request with `new` queries at the end of `context` tokens."""

    name: str
    context: int
    new: int
    dtype: str
    layout: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def workloads(contexts: list[int]) -> list[Workload]:
    rows = [("float32", "plain"), ("bfloat16", "plain"), ("bfloat16", "fp8_v4")]
    keys = [("float32", "plain"), ("bfloat16", "plain"), ("bfloat16", "fp8_index")]
    kinds = [
        ("decode", 1, rows),
        ("decode, all entries of 128", 1, rows),
        ("chunk", 64, rows),
        ("indexer", 1, keys),
    ]
    return [
        Workload(name, context, new, *kind)
        for name, new, variants in kinds
        for kind in variants
        for context in contexts
    ]


def paged(num_rows: int, n: int, width: int, load: Workload, rope_dim: int):
    """(cache, table) of random rows in shuffled blocks of n."""
    num_blocks = -(-num_rows // n)
    if load.layout == "plain":
        cache = torch.empty(num_blocks, n, width, dtype=load.torch_dtype)
    else:
        spec = row_layout(load.layout, width, rope_dim)
        cache = torch.zeros(num_blocks, spec.page_bytes(n), dtype=torch.uint8)
    table = torch.randperm(num_blocks).int()[None]
    for w in torch.arange(num_rows).split(4096):
        store_rows(
            torch.randn(len(w), width), cache, table[0].long()[w // n] * n + w % n, load.layout, rope_dim
        )
    return cache, table


def lengths(load: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([load.context]).int(), torch.tensor([0, load.new]).int()


def attention_calls(load: Workload) -> dict:
    dense = "all" in load.name
    ratio = DENSE_RATIO if dense else RATIO
    rope_dim = 0 if load.layout == "plain" else ROPE
    window = paged(load.context, BLOCK_TOKENS // 4, WIDTH, load, rope_dim)
    entries = paged(load.context // ratio, BLOCK_TOKENS // ratio, WIDTH, load, rope_dim)
    q = torch.randn(load.new, HEADS, WIDTH).to(load.torch_dtype)
    sinks = torch.randn(HEADS)
    indices = None
    if not dense:
        visible = (load.context - load.new) // ratio
        lists = [torch.randperm(visible)[:TOPK].sort().values for _ in range(load.new)]
        indices = torch.stack(lists).int()
    options = dict(scale=WIDTH**-0.5, window=WINDOW, ratio=ratio, head_dim_v=WIDTH)
    options |= dict(layout=load.layout, rope_dim=rope_dim)
    operands = (q, *window, *entries, indices, *lengths(load), sinks)
    calls = both(SPARSE_MLA_ATTENTION, operands, options)
    if load.new == 1 and not dense:
        calls["gathered"] = lambda: gathered(load, q, window, entries, indices, sinks, rope_dim)
    return calls


def gathered(load: Workload, q, window, entries, indices, sinks, rope_dim: int):
    """Attention of one query, with products in the dtype of the rows."""
    rows = [
        fetch(window, torch.arange(load.context - WINDOW, load.context), load, rope_dim),
        fetch(entries, indices[0].long(), load, rope_dim),
    ]
    kv = torch.cat(rows)
    scores = torch.cat([(q[0] @ kv.T).float() * WIDTH**-0.5, sinks[:, None]], dim=1)
    return torch.softmax(scores, dim=1)[:, :-1].to(kv.dtype) @ kv


def fetch(paged_rows, i, load: Workload, rope_dim: int) -> torch.Tensor:
    cache, table = paged_rows
    n = rows_per_block(cache, load.layout, WIDTH, rope_dim)
    blocks = table[0][i // n].long()
    if load.layout == "plain":
        return cache[blocks, i % n]
    return load_rows(cache, blocks * n + i % n, load.layout, WIDTH, rope_dim).to(load.torch_dtype)


def indexer_calls(load: Workload) -> dict:
    keys = paged(load.context // RATIO, BLOCK_TOKENS // RATIO, INDEX_WIDTH, load, 0)
    q = torch.randn(load.new, INDEX_HEADS, INDEX_WIDTH).to(load.torch_dtype)
    weights = torch.randn(load.new, INDEX_HEADS) * INDEX_HEADS**-0.5
    options = dict(topk=TOPK, ratio=RATIO, scale=INDEX_WIDTH**-0.5, layout=load.layout)
    return both(INDEXER_SCORE_TOPK, (q, weights, *keys, *lengths(load)), options)


def both(op, operands: tuple, options: dict) -> dict:
    kernel = select_provider(OpNeed(op=op.name), "cpu").overload
    return {
        "cpu": lambda: kernel(*operands, **options),
        "reference": lambda: op.overload(*operands, **options),
    }


def seconds_per_call(call) -> float:
    """One sample: repeats the call until SAMPLE_SECONDS have passed."""
    started, calls = time.perf_counter(), 0
    while True:
        call()
        calls += 1
        elapsed = time.perf_counter() - started
        if elapsed > SAMPLE_SECONDS:
            return elapsed / calls


def measure(load: Workload, rounds: int) -> dict:
    calls = indexer_calls(load) if load.name == "indexer" else attention_calls(load)
    samples = {name: [] for name in calls}
    for call in calls.values():
        call()
    for i in range(rounds):
        for name, call in calls.items():
            if name == "cpu" or i < REFERENCE_ROUNDS:
                samples[name].append(seconds_per_call(call))
    ratios = {
        f"{name}_over_cpu": round(statistics.median(x / y for x, y in zip(values, samples["cpu"])), 2)
        for name, values in samples.items()
        if name != "cpu"
    }
    medians = {name: round(statistics.median(values) * 1e3, 4) for name, values in samples.items()}
    return {
        **asdict(load),
        "median_ms": medians,
        "best_cpu_ms": round(min(samples["cpu"]) * 1e3, 4),
        **ratios,
    }


def flatness(results: list[dict]) -> dict[str, float]:
    """Time at the longest context over time at the shortest, of each decode."""
    by_kind: dict[str, list[float]] = {}
    for result in results:
        if result["name"] == "decode":
            by_kind.setdefault(f"{result['dtype']} {result['layout']}", []).append(result["median_ms"]["cpu"])
    return {kind: round(times[-1] / times[0], 3) for kind, times in by_kind.items()}


def run(threads: int, options: argparse.Namespace) -> dict:
    """All chosen workloads with a number of threads."""
    torch.set_num_threads(threads)
    report = {"threads": threads, "load_average": round(os.getloadavg()[0], 2), "results": []}
    print(f"{threads} threads")
    for load in workloads(sorted(options.contexts)):
        if options.only not in load.name:
            continue
        result = measure(load, options.rounds)
        report["results"].append(result)
        times = ", ".join(f"{name} {value} ms" for name, value in result["median_ms"].items())
        ratios = ", ".join(f"{name} {value}" for name, value in result.items() if name.endswith("_over_cpu"))
        print(
            f"{load.name} ctx{load.context} new{load.new} {load.dtype} {load.layout}: {times}; {ratios}",
            flush=True,
        )
    report["flat"] = flatness(report["results"])
    print(f"longest over shortest context: {report['flat']}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    facts = {"compiler": compiler.version().splitlines()[0], "flags": " ".join(compiler.flags())}
    report = {"machine": machine() | facts, "rounds": options.rounds}
    report["runs"] = [run(threads, options) for threads in options.threads]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
