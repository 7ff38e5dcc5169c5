"""What share of the memory's rate a decode of one request reaches: steps in turns with plain sums over memory.

python benchmarks/read_share.py [--context 128] [--context 16384] [--model DIR]

A neighbour on the machine takes up to half of its memory's rate for seconds, so the best of some sums before a run
(compare_engines.py) says little about the seconds of the run. Here some steps and some sums take turns; the share is
the median of the turns' ratios. Bytes of a step: all weights, and K and V of all tokens before it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import torch
import typer
from checkpoints import random_qwen3
from common import save, wide_console
from kv_targets import goal
from read_bandwidth import Reader
from rich.table import Table

from pagebinder import CompileConfig, EngineConfig, SamplingParams, compile_model

STEPS, SUMS = 5, 5  # of a turn
WARM_UP_STEPS = 3
GOALS = {128: 0.95, 16_384: 0.85}  # by context


def one_context(model: Path, context: int, turns: int, reader: Reader) -> dict:
    """Rates in bytes per second, and milliseconds of a step."""
    num_tokens = WARM_UP_STEPS + STEPS * turns + 1
    compiled = compile_model(model, CompileConfig(max_model_len=context + num_tokens))
    plan = compiled.kv_spec
    num_bytes = int(plan.bytes_per_token * (context + num_tokens)) + 4 * plan.bytes_per_block
    engine = compiled.engine(EngineConfig(max_num_seqs=1, prefix_caching=False, kv_cache_bytes=num_bytes))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, compiled.source.vocab_size, (context,), generator=generator).tolist()
    engine.add_request("one", ids, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    while not engine.step():
        pass
    for _ in range(WARM_UP_STEPS):
        engine.step()
    step_bytes = compiled.report.graph_weight_bytes + plan.bytes_per_token * (context + num_tokens // 2)
    rows = []
    for _ in range(turns):
        started = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        seconds = (time.perf_counter() - started) / STEPS
        rows.append({"step_ms": seconds * 1e3, "read": mean(reader.bytes_per_second() for _ in range(SUMS))})
        rows[-1]["share"] = step_bytes / seconds / rows[-1]["read"]
    medians = {key: median(row[key] for row in rows) for key in rows[0]}
    return {"context": context, "step_bytes": step_bytes, **medians, "turns": rows}


def main(
    context: Annotated[list[int] | None, typer.Option(help="Tokens before; may be repeated.")] = None,
    turns: Annotated[int, typer.Option(min=1)] = 20,
    threads: Annotated[int, typer.Option(min=1)] = torch.get_num_threads(),
    model: Annotated[Path | None, typer.Option(help="Default: random, Qwen3-0.6B's shape.")] = None,
) -> None:
    torch.set_num_threads(threads)
    reader = Reader(threads)
    with tempfile.TemporaryDirectory(prefix="read-share-") as folder:
        if model is None:
            model = Path(folder)
            random_qwen3(model)
        results = {
            "threads": threads,
            "contexts": [one_context(model, n, turns, reader) for n in context or GOALS],
        }
    reader.close()
    results["goals"] = [
        goal(f"context {row['context']:,}, share of a plain sum's rate", row["share"], GOALS[row["context"]])
        for row in results["contexts"]
        if row["context"] in GOALS
    ]
    table = Table("context", "ms a step", "GB/s", "a plain sum, GB/s", "share", title="decode of one request")
    for row in results["contexts"]:
        rate = row["step_bytes"] / row["step_ms"] / 1e6
        figures = (row["step_ms"], rate, row["read"] / 1e9)
        table.add_row(f"{row['context']:,}", *(f"{x:.1f}" for x in figures), f"{row['share']:.2f}")
    wide_console().print(table)
    print(f"wrote {save('read_share', results)}")


if __name__ == "__main__":
    typer.run(main)
