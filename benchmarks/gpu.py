"""Every GPU test and benchmark in one command, under 10 minutes and without the internet (`make gpu`).

    python benchmarks/gpu.py [--tests-only | --benchmarks-only] [--output FILE] [--cases TEXT] [--seconds N]

Writes benchmarks/results/<gpu>.json after every case: the tests' verdict, the ceilings measured in this run (copy
bandwidth, matrix product), and each kernel beside them; the tests' output lies beside it. Without a GPU it says so
and exits with 1; so it does where a test or a case fails or is not reached, which the file then says.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

import torch
from common import RESULTS, machine
from gpu_isolated import Case, Isolated, work
from gpu_tests import run_tests

SECONDS = 540.0  # for everything
TEST_SHARE = 0.5  # of them
CASE_SECONDS = 90.0
SHOWN = 40  # failures


def all_cases(copy: float) -> list[Case]:
    """(name, what gives its rows) of each; what tells most first, as time may be up before the last."""
    from gpu_async import asynchronous_steps
    from gpu_attention_forms import cases as attention_forms
    from gpu_captured import captured_steps
    from gpu_cases import cases as paged_attention
    from gpu_latent import cases as latents
    from gpu_llama import cases as llama
    from gpu_product_cases import cases as products
    from gpu_recurrent import cases as recurrences

    one, many, by_transformers = llama(copy)
    engines = [one, many, ("captured steps", captured_steps)]
    later = [("asynchronous steps", asynchronous_steps), by_transformers]
    first, last = (paged_attention, latents), (attention_forms, recurrences, products)
    of_first, of_last = ([case for form in forms for case in form(copy)] for forms in (first, last))
    return [*engines, *of_first, *later, *of_last]


def work_on_cases(wanted: str, first: int, path: Path) -> int:
    """In a process of its own."""
    from gpu_timing import copy_gb_per_s, matmul_tflop_per_s

    torch.manual_seed(0)
    copy = copy_gb_per_s()
    facts = {"copy_gb_per_s": copy, "matmul_bf16_tflop_per_s": matmul_tflop_per_s()}
    torch.cuda.empty_cache()
    cases = [(name, _and_empty_cache(run)) for name, run in all_cases(copy) if _is_wanted(name, wanted)]
    return work(path, first, cases, facts)


def _is_wanted(name: str, wanted: str) -> bool:
    return any(text in name for text in wanted.split("|"))


def _and_empty_cache(run):
    def case() -> list[dict]:
        rows = run()
        torch.cuda.empty_cache()
        return rows

    return case


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--tests-only", action="store_true")
    only.add_argument("--benchmarks-only", action="store_true")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<gpu>.json")
    parser.add_argument("--cases", default="", help="only those whose name has this in it; A|B: either")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything, at most")
    parser.add_argument("--worker", nargs=2, metavar=("FIRST", "FILE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options, started = arguments(), time.monotonic()
    if options.worker:
        return work_on_cases(options.cases, int(options.worker[0]), Path(options.worker[1]))
    if not torch.cuda.is_available():
        print("There is no GPU here: torch.cuda.is_available() is False. Nothing was tested or measured.")
        return 1
    import triton

    name = torch.cuda.get_device_name()
    report = {"machine": machine(), "gpu": name, "triton": triton.__version__, "cuda": torch.version.cuda}
    path = options.output or RESULTS / f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def keep(part: str, found: dict) -> None:
        report[part] = found
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(report, indent=2) + "\n")
        unfinished.replace(path)

    if not options.benchmarks_only:
        seconds = options.seconds * (1 if options.tests_only else TEST_SHARE)
        keep("tests", run_tests(path.with_suffix(".tests.log"), seconds))
    if not options.tests_only:
        command = [sys.executable, __file__, "--cases", options.cases, "--worker"]
        lines, deadline = path.with_suffix(".lines"), started + options.seconds
        Isolated(command, lines, deadline, CASE_SECONDS, lambda found: keep("benchmarks", found)).run()
        lines.unlink()
    print(f"wrote {path} after {time.monotonic() - started:.0f} s")
    return summary(report)


def summary(report: dict) -> int:
    """Prints what failed, last of all, and returns the exit code."""
    tests, benchmarks = report.get("tests", {}), report.get("benchmarks", {})
    errors = [row for row in benchmarks.get("results", ()) if "error" in row]
    not_run = benchmarks.get("not_run", [])
    for line in [*tests.get("failed", ()), *(f"{row['case']}: {row['error']}" for row in errors)][:SHOWN]:
        print(line[:230])
    if tests:
        print(f"tests: {tests['summary'] or 'none'} ({'' if tests['finished'] else 'not '}finished)")
    if benchmarks:
        print(
            f"benchmarks: {len(benchmarks['results'])} rows, {len(errors)} errors, not run: {not_run or 'none'}"
        )
    return 0 if tests.get("passed", True) and not errors and not not_run else 1


if __name__ == "__main__":
    sys.exit(main())
