"""The GPU tests, as `gpu.py` runs them: in several processes, as most of their time is that of compiling kernels."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
GPU_TESTS = (
    "tests/runtime/graphs/test_cuda_graphs.py",  # few and slow: first
    "tests/runtime/streams/test_cuda_streams.py",
    "tests/runtime/test_cuda_async.py",
    "tests/custom_ops/triton",
)
NOT_HERE = "tests/custom_ops/triton/test_compiled_for.py"  # what is compiled there runs here
NIGHTLY = "PAGEBINDER_NIGHTLY"  # tests that a day's run on a CPU leaves out
MAX_PROCESSES = 12
TEST_SECONDS = 120  # of one test


def run_tests(log: Path, seconds: float) -> dict:
    """Run them for so many seconds at most, with all output in `log`; what failed by then is known in any case."""
    command, started = _command(), time.monotonic()
    # One line a failure, whatever the terminal is.
    environment = {
        "CUDA_VISIBLE_DEVICES": "0",  # else tests run on the CPU
        **os.environ,
        "COLUMNS": "240",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        NIGHTLY: "1",
    }
    with log.open("w") as file:
        tests = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        finished = _wait(tests, seconds)
    lines = log.read_text(errors="replace").splitlines()
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|error)", line)]
    return {
        "command": " ".join(command[1:]), "passed": finished and tests.returncode == 0, "finished": finished,
        "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
        "summary": counts[-1] if counts else "", "seconds": time.monotonic() - started,
    }  # fmt: skip


def _command() -> list[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        *GPU_TESTS,
        "-vv",
        "--tb=short",
        "-rfE",
        "-p",
        "no:cacheprovider",
    ]
    command.append(f"--ignore={NOT_HERE}")
    processes = min(MAX_PROCESSES, (os.cpu_count() or 1) - 2)
    if processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(processes)]
    if importlib.util.find_spec("pytest_timeout"):
        command += [f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]
    return command


def _wait(tests: subprocess.Popen, seconds: float) -> bool:
    """Are they done in time? Else they are asked to tell what they know, and then ended."""
    try:
        tests.wait(timeout=seconds)
        return True
    except subprocess.TimeoutExpired:
        tests.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            tests.wait(timeout=15)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)  # processes of its own may still run
        tests.wait()
