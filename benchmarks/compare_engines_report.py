"""The results of compare_engines.py as tables and goals on the console, and as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

from common import RESULTS, save, wide_console
from compare_engines_goals import US, goals
from rich.table import Table

NAME = "compare_engines"


def kept(name: str = NAME) -> dict:
    """What the last run wrote, or nothing."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(results: dict) -> Path:
    """Write benchmarks/results/compare_engines.json, or what the settings name: all that there is so far."""
    return save(
        results["settings"]["result"], {key: value for key, value in results.items() if key != "machine"}
    )


def report(results: dict) -> None:
    """Judge, print and keep everything."""
    console = wide_console()
    results["load_average"] = round(os.getloadavg()[0], 2)
    results["goals"] = goals(results)
    for title, case in compared(results).items():
        console.print(table(title, case))
    for row in results.get("step", ()):
        console.print(table_of_a_step(row))
    for name, start in results.get("start", {}).items():
        console.print(f"{name}: ready after {start['ready_seconds']:.1f} s")
    read, product = (results["limits"][name] / 1e9 for name in ("read", "product"))
    console.print(f"machine: reads {read:.1f} GB/s, multiplies {product:,.0f} GFLOP/s")
    for g in results["goals"]:
        result = "pass" if g["pass"] else "FAIL"
        most = f"; the machine's own limit gives {g['allowed']:.2f}" if "allowed" in g else ""
        console.print(f"{result} {g['name']}: {g['value']:g} ({g['is']} {g['target']:g}{most})")
    path = keep(results)
    console.print(f"wrote {path.relative_to(path.parents[2])}")


def compared(results: dict) -> dict[str, dict]:
    """The cases that compare engines, by what they are called."""
    found = {f"batch of {n}": case for n, case in results.get("batch", {}).items()}
    names = ("mixed", "contention", "context", "quantized", "gguf")
    return found | {name: results[name] for name in names if name in results}


def table(title: str, case: dict) -> Table:
    """Each engine's figures, and ours over theirs."""
    engines, equal = case["engines"], case.get("equal_tokens", {})
    keys = [key for key in next(iter(engines.values())) if key not in ("rounds", "read_bytes_per_second")]
    columns = ("engine", *(key.replace("_", " ") for key in keys), "equal tokens")
    found = Table(*columns, title=title, caption=f"x: {US}'s figure over that engine's")
    for name, figures in engines.items():
        cells = [f"{figures[key]:,.3g}" for key in keys]
        if name != US and US in engines:
            cells = [f"{cell} (x {engines[US][key] / figures[key]:.2f})" for cell, key in zip(cells, keys)]
        found.add_row(name, *cells, f"{equal[name]:.0%}" if name in equal else "")
    return found


def table_of_a_step(row: dict) -> Table:
    found = Table(
        "op", "ms", "at least", title=f"a decode step of {row['requests']}: {row['step_ms']:.1f} ms"
    )
    for name, op in sorted(row["ops"].items(), key=lambda item: -item[1]["ms"]):
        found.add_row(name, f"{op['ms']:.2f}", f"{op['limit_ms']:.2f}")
    return found
