"""Threads that help with loops: nobody waits for one that stands still, and what it does too late harms nothing."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from pagebinder.custom_ops.cpu import pack
from pagebinder.custom_ops.linear import packed_weights
from pagebinder.custom_ops.providers import registered_providers
from pagebinder.errors import CompilerNotFoundError

THREADS = 3
STALL_MICROSECONDS = 3_000


@pytest.fixture(scope="module")
def cpu():
    provider = registered_providers()["cpu"]
    if isinstance(provider.problem(), CompilerNotFoundError):
        pytest.skip(str(provider.problem()))
    provider.prepare("linear")
    provider.prepare("sample_tokens")
    return torch.ops.pagebinder_cpu


@pytest.fixture
def helpers(cpu):
    """The ops, with threads, and a way to let helpers stand still before they write a result."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield cpu
    cpu.stall_helpers(0)
    torch.set_num_threads(before)


def operands(rows: int, columns: int = 1_024, inner: int = 1_024, dtype=torch.bfloat16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    return x, (torch.randn(columns, inner, generator=generator) * inner**-0.5).to(dtype)


def layer(helpers, kind: str, weight):
    """One call x -> y of a kernel."""
    if kind in ("packed", "coded"):
        weight = packed_weights.pack(weight) if kind == "packed" else pack.code(weight)
    if kind == "gated":
        return lambda x: helpers.gated_linear(x, *weight.chunk(2), None, None, activation="silu")
    return lambda x: helpers.linear(x, weight)


CASES = [
    ("rows of vectors", 2, torch.bfloat16),
    ("rows of vectors", 3, torch.float32),
    ("tiles", 6, torch.bfloat16),
    ("tiles", 70, torch.bfloat16),
    ("packed", 1, torch.bfloat16),
    ("packed", 70, torch.bfloat16),
    ("packed", 300, torch.bfloat16),
    ("coded", 2, torch.bfloat16),
    ("gated", 1, torch.bfloat16),
    ("gated", 40, torch.bfloat16),
]


@pytest.mark.parametrize(("kind", "rows", "dtype"), CASES)
def test_what_a_thread_left_undone_is_done_again(helpers, kind, rows, dtype):
    """x is overwritten and given back at once, as in a model: a late helper's sums of it are dropped."""
    x, weight = operands(rows, dtype=dtype)
    call = layer(helpers, kind, weight)
    expected, redone = call(x).clone(), helpers.thread_pool_counts()[1]
    helpers.stall_helpers(STALL_MICROSECONDS)
    for _ in range(400):
        given = x.clone()
        y = call(given)
        given.fill_(float("nan"))
        del given
        assert torch.equal(y, expected)
        if helpers.thread_pool_counts()[1] > redone + 20:
            break
    if helpers.reads_packed_weights() or kind == "rows of vectors":
        assert helpers.thread_pool_counts()[1] > redone, "no helper was left behind"


def test_a_late_helper_keeps_the_weights(helpers):
    """Weights that are let go while a helper reads them stay mapped."""
    for seed in range(20):
        x, weight = operands(40, seed=seed)
        helpers.stall_helpers(STALL_MICROSECONDS)
        y = helpers.linear(x, packed_weights.pack(weight))
        helpers.stall_helpers(0)
        expected = torch.nn.functional.linear(x.double(), weight.double())
        del x, weight
        gc.collect()
        assert (y.double() - expected).abs().max() < 0.05


@pytest.mark.parametrize("kind", ["packed", "coded", "gated"])
def test_threads_without_work_ask_for_the_weights_of_the_next_layer(helpers, kind):
    """Of two layers that take turns each successor is known from the second time on; values stay as they are."""
    if not helpers.reads_packed_weights():
        pytest.skip("packed weights need matrix tiles or BF16 dots")
    layers = []
    for seed in range(2):
        x, weight = operands(1, columns=2_048, seed=seed)
        if kind == "gated":
            gate, up = (packed_weights.pack(w) for w in weight.chunk(2))
            layers.append(
                lambda x, g=gate, u=up: helpers.gated_linear(x, g, u, None, None, activation="silu")
            )
        else:
            layers.append(layer(helpers, kind, weight))
    expected = [call(x) for call in layers]
    asked = helpers.thread_pool_counts()[3]
    for _ in range(500):
        assert all(torch.equal(call(x), y) for call, y in zip(layers, expected, strict=True))
        if helpers.thread_pool_counts()[3] > asked + (1 << 16):
            break
    assert helpers.thread_pool_counts()[3] > asked + (1 << 16)


def test_callers_at_the_same_time(helpers):
    """One has the helpers, the others work alone."""
    x, weight = operands(33)
    expected = helpers.linear(x, weight)
    wrong = []

    def work():
        wrong.extend(not torch.equal(helpers.linear(x, weight), expected) for _ in range(60))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 180 and not any(wrong)


def test_all_libraries_share_their_threads(helpers):
    """Linear layers and sampling are two libraries; argmax of that many logits takes threads."""
    x, weight = operands(70)
    helpers.linear(x, weight)
    helpers.argmax_tokens(torch.randn(8, 1 << 19))
    assert helpers.thread_pool_counts()[0] >= THREADS - 1
    if Path("/proc/self/task").exists():
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        assert names.count("pagebinder") == helpers.thread_pool_counts()[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_threads_of_its_own(helpers):
    """Its comparisons are numpy's: OpenMP, and so most of torch, hangs in the child of a process that used it."""
    x, weight = operands(40)
    expected = helpers.linear(x, weight)
    bits = expected.view(torch.int16).numpy()
    child = os.fork()
    if child == 0:
        results = [helpers.linear(x, weight).view(torch.int16).numpy() for _ in range(20)]
        right = all((result == bits).all() for result in results)
        os._exit(0 if right and helpers.thread_pool_counts()[0] == THREADS - 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(helpers.linear(x, weight), expected)


def test_a_process_ends_while_a_helper_stands_still():
    program = """
import torch
from pagebinder.custom_ops.providers import registered_providers
registered_providers()["cpu"].prepare("linear")
torch.set_num_threads(3)
ops = torch.ops.pagebinder_cpu
ops.stall_helpers(500_000)
for _ in range(3):
    ops.linear(torch.ones(4, 1024), torch.ones(1024, 1024))
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
