"""Every GPU test and benchmark in one command, under 10 minutes and without the internet (`make gpu`).

    python benchmarks/gpu.py [--tests-only | --benchmarks-only] [--output FILE]

Writes benchmarks/results/<gpu>.json: the tests' verdict, the ceilings measured in this run (copy bandwidth, matrix
product), and each kernel beside them. Without a GPU it says so and exits with 1; so it does where a test or a case
fails, which the file then says.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from common import RESULTS, machine

ROOT = Path(__file__).parent.parent
GPU_TESTS = (
    "tests/custom_ops/triton",
    "tests/runtime/graphs/test_cuda_graphs.py",
    "tests/runtime/streams/test_cuda_streams.py",
    "tests/runtime/test_cuda_async.py",
)
TEST_SECONDS = 300


def run_tests() -> dict:
    """The tests of kernels; on a machine with a GPU they run there."""
    command = [sys.executable, "-m", "pytest", *GPU_TESTS, "-q"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_SECONDS)
        lines, passed = done.stdout.splitlines(), done.returncode == 0
    except subprocess.TimeoutExpired as error:
        lines, passed = [f"not finished after {error.timeout:.0f} s"], False
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    print("\n".join([*lines[-30:]]))
    return {
        "command": " ".join(["pytest", *GPU_TESTS]),
        "passed": passed,
        "failed": failed,
        "summary": lines[-1:],
    }


def run_benchmarks() -> dict:
    from gpu_async import asynchronous_steps
    from gpu_attention_forms import runs as attention_forms
    from gpu_captured import captured_steps
    from gpu_cases import DECODES, PREFILLS, decode, elementwise, prefill
    from gpu_latent import runs as latent_runs
    from gpu_product_cases import cases as product_cases
    from gpu_recurrent import runs as recurrent_runs
    from gpu_timing import copy_gb_per_s, matmul_tflop_per_s

    copy = copy_gb_per_s()
    report = {"copy_gb_per_s": copy, "matmul_bf16_tflop_per_s": matmul_tflop_per_s(), "results": []}
    print(f"copy {copy:.0f} GB/s, bf16 matrix product {report['matmul_bf16_tflop_per_s']:.0f} TFLOP/s")
    runs = [lambda s=shape, c=codes: [decode(copy, *s, c)] for codes in ("", "fp8_e4m3") for shape in DECODES]
    runs += [lambda s=shape: [prefill(*s)] for shape in PREFILLS]
    runs.append(lambda: elementwise(copy))
    runs += [lambda c=case: [c()] for case in product_cases(copy)]
    runs += [*attention_forms(copy), *latent_runs(copy), *recurrent_runs(copy)]
    runs += [captured_steps, asynchronous_steps]
    for run in runs:
        try:
            results = run()
        except (
            RuntimeError,
            ValueError,
        ) as error:  # also out of memory; the other cases are still worth having
            results = [{"error": f"{type(error).__name__}: {error}"}]
        for result in results:
            print(
                ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items())
            )
            report["results"].append(result)
        torch.cuda.empty_cache()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--tests-only", action="store_true")
    only.add_argument("--benchmarks-only", action="store_true")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<gpu>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here: torch.cuda.is_available() is False. Nothing was tested or measured.")
        return 1
    torch.manual_seed(0)
    import triton

    name = torch.cuda.get_device_name()
    report = {"machine": machine(), "gpu": name, "triton": triton.__version__, "cuda": torch.version.cuda}
    if not options.benchmarks_only:
        report["tests"] = run_tests()
    if not options.tests_only:
        report["benchmarks"] = run_benchmarks()
    path = options.output or RESULTS / f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {path}")
    has_error = any("error" in result for result in report.get("benchmarks", {}).get("results", ()))
    return 0 if report.get("tests", {}).get("passed", True) and not has_error else 1


if __name__ == "__main__":
    sys.exit(main())
