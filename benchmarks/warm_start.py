"""From starting Python to the first token: an artefact, against `compile_model` with all its caches warm.

python benchmarks/warm_start.py [--rounds 5]

Models: the shipped one, and a random checkpoint of Qwen3-0.6B's shape in bf16, made in a temporary directory. Every
start is a process of its own; artefact and compilation take turns, and so does reading the weights' files from the
page cache into memory of their own, which both have to do as well. How long that memory takes is up to the host of a
virtual machine, and changes: `beyond` is a start's total without the reading beside it, of each round. Processor
times stand beside: other processes change them less.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import typer
from checkpoints import CHECKPOINTS
from common import save, wide_console
from rich.table import Table

WORKER = Path(__file__).with_name("warm_start_worker.py")
GOAL_SECONDS = 3.0  # of a 0.6B model, beyond the time to read its weights


MODELS = ("tiny", "qwen3-0.6b")


def in_process(kind: str, model: Path) -> dict:
    """What one start of the worker says."""
    command = [sys.executable, str(WORKER), kind, str(model)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def read_weights(model: Path) -> float:
    """Seconds to read the checkpoint's files from the page cache into new memory, in huge pages, by one thread."""
    before = time.perf_counter()
    for path in model.glob("*.safetensors"):
        with mmap.mmap(-1, path.stat().st_size) as memory, open(path, "rb") as file:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            file.readinto(memory)
    return time.perf_counter() - before


def num_bytes(files) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


def measure(build: Callable[[Path], None], rounds: int) -> dict:
    """All starts of one model: the fastest of each kind in full, and the totals of all."""
    with tempfile.TemporaryDirectory(prefix="warm-start-") as folder:
        model, artefact = Path(folder) / "model", Path(folder) / "model.artefact"
        build(model)
        made = in_process("save", model)["stages"]
        runs: dict[str, list[dict]] = {"artefact": [], "compile": []}
        reads = []
        for _ in range(rounds):
            runs["artefact"].append(in_process("artefact", artefact))
            reads.append(read_weights(model))
            runs["compile"].append(in_process("compile", model))
        sizes = {
            "artefact_bytes": num_bytes(artefact.rglob("*")),
            "weight_bytes": num_bytes(model.glob("*.safetensors")),
        }
    best = {kind: min(results, key=lambda r: r["total"]) for kind, results in runs.items()}
    totals = {kind: sorted(r["total"] for r in results) for kind, results in runs.items()}
    beyond = sorted(start["total"] - read for start, read in zip(runs["artefact"], reads, strict=True))
    return {
        **best, "totals": totals, "read_weights": sorted(reads), "beyond": beyond, "save": made["save"], **sizes
    }  # fmt: skip


def main(rounds: int = 5, models: list[str] | None = None) -> None:
    results = {name: measure(CHECKPOINTS[name], rounds) for name in models or MODELS}
    table = Table(title="start to first token in seconds, the fastest (on the processor)")
    for column in (
        "model",
        "artefact",
        "compile, warm",
        "ratio",
        "read weights",
        "beyond",
        "decode, ms",
        "artefact's stages",
    ):
        table.add_column(column)
    for name, r in results.items():
        totals = [r[kind]["total"] for kind in ("artefact", "compile")]
        texts = [f"{r[kind]['total']:.2f} ({r[kind]['processor']:.2f})" for kind in ("artefact", "compile")]
        decode = " / ".join(f"{1e3 * r[kind]['decode']:.1f}" for kind in ("artefact", "compile"))
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in r["artefact"]["stages"].items())
        ratio = f"{totals[1] / totals[0]:.1f}"
        reads, beyond = (
            " ".join(f"{seconds:.2f}" for seconds in r[key]) for key in ("read_weights", "beyond")
        )
        table.add_row(name, *texts, ratio, reads, beyond, decode, stages)
    wide_console().print(table)
    print(f"goal of qwen3-0.6b: under {GOAL_SECONDS} s beyond reading its weights")
    print(f"wrote {save('warm_start', results)}")


if __name__ == "__main__":
    typer.run(main)
