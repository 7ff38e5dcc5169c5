"""What every benchmark shares: machine facts, alternating timing, JSON results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

RESULTS = Path(__file__).parent / "results"


def machine() -> dict:
    """CPU, cores, threads and versions that a figure depends on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        model = next((value.strip() for key, value in lines if key.strip() == "model name"), model)
    import transformers

    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def alternate(
    cases: dict[str, Callable[[], object]], *, rounds: int, warmups: int = 1
) -> dict[str, list[float]]:
    """Seconds of each case, run in turns so that a busy moment hits all of them alike."""
    for _ in range(warmups):
        for run in cases.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def wide_console() -> Console:
    """Prints tables in full where there is no terminal to say how wide they may be."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


def median(values: list[float]) -> float:
    return statistics.median(values)


def save(name: str, results: dict) -> Path:
    """Write results with the machine's facts to benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n")
    return path
