"""Decode of a 0.6B model in bf16 by number of requests: tokens per second, weights per second, parts of a step.

python benchmarks/decode_step.py [--requests 1 --requests 8] [--steps 40] [--context 128]

Random weights of Qwen3-0.6B's shape. Every step decodes one token for each request. The best step is what the machine
can do, the median what it did; processor time counts all threads, waiting ones too where they spin.
"""

from __future__ import annotations

import os
import time
from typing import Annotated

import torch
import typer
from common import median, save, wide_console
from prefix_ttft import qwen3_600m
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model

WARM_UP_STEPS = 3
PROFILED_STEPS = 4
PROGRAMS = "run_"  # how the names of those of our ops begin that call others


def decoding_engine(compiled, requests: int, context: int, steps: int):
    """An engine whose requests have all computed their prompts."""
    engine = compiled.engine(
        EngineConfig(max_num_seqs=requests, max_num_batched_tokens=4_096, prefix_caching=False)
    )
    params = SamplingParams(
        max_tokens=steps + WARM_UP_STEPS + PROFILED_STEPS + 8, temperature=0.0, ignore_eos=True
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, compiled.source.vocab_size, (requests, context), generator=generator)
    for number, prompt in enumerate(prompts.tolist()):
        engine.add_request(f"r{number}", prompt, params)
    scheduled = 0
    while scheduled != requests:
        before = engine.stats().scheduled_tokens
        engine.step()
        scheduled = engine.stats().scheduled_tokens - before
    return engine


def parts_of_a_step(engine) -> dict[str, float]:
    """Share of each op of ours, and of everything else, in the time of some steps."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED_STEPS):
            engine.step()
    events = profiled.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    ours = {e.key.split("::")[1]: e for e in events if e.key.startswith("pagebinder")}
    shares = {n: e.cpu_time_total / total for n, e in ours.items() if not n.startswith(PROGRAMS)}
    return shares | {"other": 1.0 - sum(shares.values())}


def measure(compiled, weight_bytes: int, requests: int, context: int, steps: int) -> dict:
    engine = decoding_engine(compiled, requests, context, steps)
    seconds, processor = [], []
    for _ in range(WARM_UP_STEPS + steps):
        started, used = time.perf_counter(), time.process_time()
        engine.step()
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    best, middle = min(seconds[WARM_UP_STEPS:]), median(seconds[WARM_UP_STEPS:])
    return {
        "requests": requests,
        "context": context,
        "step_ms": {"best": 1e3 * best, "median": 1e3 * middle, "processor": 1e3 * min(processor)},
        "tokens_per_second": {"best": requests / best, "median": requests / middle},
        "weights_gb_per_second": {"best": weight_bytes / best / 1e9, "median": weight_bytes / middle / 1e9},
        "share": parts_of_a_step(engine),
        "load_average": round(os.getloadavg()[0], 2),
    }


def main(
    requests: Annotated[list[int] | None, typer.Option(min=1, help="Requests that decode at once.")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 40,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    fusions: Annotated[bool, typer.Option(help="Without: the separate ops.")] = True,
    executable: Annotated[str, typer.Option(help="auto, eager, native or inductor.")] = "auto",
) -> None:
    """Run everything, print a table, write benchmarks/results/decode_step.json."""
    console = wide_console()
    model = qwen3_600m()
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    compiled = compile_model(model, CompileConfig(executable=executable, fusions=fusions))
    rows = [measure(compiled, weight_bytes, count, context, steps) for count in requests or (1, 8, 32)]
    table = Table("requests", "tokens/s best (median)", "weights GB/s", "step ms", "processor ms", "parts")
    for row in rows:
        parts = sorted(row["share"].items(), key=lambda part: -part[1])
        table.add_row(
            str(row["requests"]),
            f"{row['tokens_per_second']['best']:.1f} ({row['tokens_per_second']['median']:.1f})",
            f"{row['weights_gb_per_second']['best']:.1f}",
            f"{row['step_ms']['best']:.1f}",
            f"{row['step_ms']['processor']:.1f}",
            ", ".join(f"{name} {share:.0%}" for name, share in parts[:5]),
        )
    console.print(table)
    path = save("decode_step", {"fusions": fusions, "results": rows})
    console.print(f"wrote {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    typer.run(main)
