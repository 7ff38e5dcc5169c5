"""What the machine itself can do: how fast it reads memory, and how fast it multiplies matrices in bf16.

Decode reads every weight once a step and writes next to nothing, so its limit is a rate of reading alone; a copy
(as in `pagebinder bench`) also pays for what it writes. read_bandwidth.cpp is built with the flags of our kernels.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from pagebinder.custom_ops.cpu.compiler import find_compiler, flags

SOURCE = Path(__file__).with_suffix(".cpp")
BUFFER_BYTES = 1 << 30  # no cache holds it
PRODUCT = (512, 4096, 4096)  # rows, inner, columns


def read_bytes_per_second(threads: int, rounds: int = 8) -> float:
    """The best of `rounds` sums over BUFFER_BYTES in huge pages, a contiguous part for each thread."""
    with tempfile.TemporaryDirectory(prefix="read-bandwidth-") as folder:
        path = Path(folder) / "read_bandwidth.so"
        subprocess.run(
            [*find_compiler(), *flags(), "-shared", "-pthread", str(SOURCE), "-o", str(path)], check=True
        )
        read = ctypes.CDLL(str(path)).read_bandwidth
    read.argtypes, read.restype = (ctypes.c_size_t, ctypes.c_int, ctypes.c_int), ctypes.c_double
    rate = read(BUFFER_BYTES, threads, rounds)
    assert rate > 0, "the memory could not be read"
    return rate


def product_flops_per_second(rounds: int = 20) -> float:
    """The best of `rounds` products of PRODUCT's shape in bf16 by torch, with its threads."""
    rows, inner, columns = PRODUCT
    a, b = torch.randn(rows, inner).bfloat16(), torch.randn(inner, columns).bfloat16()
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - started)
    return 2 * rows * inner * columns / min(seconds[1:])
