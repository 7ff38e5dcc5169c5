"""Tests run on the CPU, GPU or not: with CUDA_VISIBLE_DEVICES=0 those that need one run, too.

Without a GPU, Triton's interpreter runs the kernels; triton reads that as it is first imported.

Tests that nightly.txt names are left out by day.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `make test` has it: more threads sum in other orders
import torch

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # else checkpoint directories would be compiled for the GPU
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TORCH_WARM_POOL", "0")  # processes of inductor that compile for GPUs only

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in a shell's background; Ctrl-C is what some tests are about
    signal.signal(signal.SIGINT, signal.default_int_handler)

NIGHTLY = [
    line
    for line in (Path(__file__).parent / "nightly.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def pytest_collection_finish():
    """What was imported stays to the end: no collection needs to look at it."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def pytest_runtest_logfinish():
    """Behind an illegal access nothing works in this process any more: xdist starts another for the tests to come."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"this process gives up its tests: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)


@pytest.fixture(scope="module", autouse=True)
def collected_once():
    """What a file leaves behind stays, too, as compiled models do: millions of objects, seconds a collection."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def captured_once():
    """See tests/captures.py."""
    import pagebinder.compile as compiler
    from tests.captures import capture_once

    before = compiler._capture
    compiler._capture = capture_once
    yield
    compiler._capture = before


def pytest_collection_modifyitems(config, items):
    """A test that is asked for by its name runs at any time."""
    asked = any("::" in argument for argument in config.args) or config.option.keyword
    if os.environ.get("PAGEBINDER_NIGHTLY") == "1" or asked:
        return
    skip = pytest.mark.skip(reason="takes long: PAGEBINDER_NIGHTLY=1")
    unused = set(NIGHTLY)
    for item in items:
        if matching := [name for name in NIGHTLY if item.nodeid.startswith(name)]:
            unused -= set(matching)
            item.add_marker(skip)
    everything = [str(Path(__file__).parent)] == [str(Path(a).resolve()) for a in config.args]
    if everything and unused:
        raise pytest.UsageError(f"nightly.txt names no test: {', '.join(sorted(unused))}")
