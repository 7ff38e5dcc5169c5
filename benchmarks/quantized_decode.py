"""Decode of one request with weights of 8 and 4 bits against our own bf16: a whole model, formats in turns.

    python benchmarks/quantized_decode.py [--checkpoint DIR] [--rounds 7] [--threads 2]

A random Qwen3-0.6B by default, a prompt of 128 tokens, 48 new ones. The median step of a run counts; the ratio is the
median over rounds of the ratio to bf16's run of the same round, as memory's speed changes from minute to minute.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from checkpoints import random_qwen3
from common import machine, median, save, wide_console
from rich.table import Table

import pagebinder
from pagebinder import CompileConfig, EngineConfig, SamplingParams

FORMATS = (None, "fp8", "int8", "int4_g64", "int4_g32", "mxfp4")
PROMPT, NEW, WARM = list(range(10, 138)), 48, 2


def step_seconds(engine) -> float:
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    engine.add_request("measured", PROMPT, params)
    seconds = []
    while engine.has_unfinished:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARM:])  # the first computes the prompt


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="a decoder in bf16")] = None,
    rounds: Annotated[int, typer.Option(help="of all formats in turn")] = 7,
    threads: Annotated[int, typer.Option(help="of ours and of torch's")] = 2,
) -> None:
    """Print a table and keep the figures in results/quantized_decode.json."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is None:
            checkpoint = Path(folder)
            random_qwen3(checkpoint)
        engines = {}
        for name in FORMATS:
            compiled = pagebinder.compile_model(checkpoint, CompileConfig(quantization=name))
            engines[name or "bf16"] = compiled.engine(EngineConfig(num_kv_blocks=64, prefix_caching=False))
        for engine in engines.values():
            step_seconds(engine)
        runs = [{name: step_seconds(engine) for name, engine in engines.items()} for _ in range(rounds)]
    results = {
        name: {
            "tokens_per_second": median(1 / run[name] for run in runs),
            "times_as_fast_as_bf16": [run["bf16"] / run[name] for run in runs],
        }
        for name in engines
    }
    table = Table("weights", "tokens/s", "times as fast as bf16: median", "least", "most")
    for name, figures in results.items():
        over = figures["times_as_fast_as_bf16"]
        row = (f"{x:.2f}" for x in (median(over), min(over), max(over)))
        table.add_row(name, f"{figures['tokens_per_second']:.1f}", *row)
    wide_console().print(table)
    save("quantized_decode", {"machine": machine(), "threads": threads, "results": results})


if __name__ == "__main__":
    typer.run(main)
