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
HOPELESS_SECONDS = 3.0  # for a product


class Reader:
    """A buffer of BUFFER_BYTES in huge pages, to be read as often as one likes."""

    def __init__(self, threads: int) -> None:
        with tempfile.TemporaryDirectory(prefix="read-bandwidth-") as folder:
            path = Path(folder) / "read_bandwidth.so"
            subprocess.run(
                [*find_compiler(), *flags(), "-shared", "-pthread", str(SOURCE), "-o", str(path)], check=True
            )
            self._library = ctypes.CDLL(str(path))
        self._library.make_buffer.restype = ctypes.c_void_p
        self._library.read_once.restype = ctypes.c_double
        self._buffer = ctypes.c_void_p(self._library.make_buffer(ctypes.c_size_t(BUFFER_BYTES)))
        self._threads = threads
        assert self._buffer, "there is no memory"

    def bytes_per_second(self) -> float:
        """Of a sum over the buffer, a contiguous part for each thread: the better of two ways to ask for it."""
        size = ctypes.c_size_t(BUFFER_BYTES)
        rates = [self._library.read_once(self._buffer, size, self._threads, ask) for ask in (False, True)]
        assert min(rates) > 0, "the memory could not be read"
        return max(rates)

    def close(self) -> None:
        self._library.free_buffer(self._buffer)


def product_flops_per_second(rounds: int = 20) -> float:
    """The best of `rounds` products of PRODUCT's shape by torch, with its threads, in bf16 or float32: without
    AVX-512 torch has no bf16 products to speak of."""
    rows, inner, columns = PRODUCT
    best = max(_product_rate(dtype, rounds) for dtype in (torch.bfloat16, torch.float32))
    return 2 * rows * inner * columns * best


def _product_rate(dtype: torch.dtype, rounds: int) -> float:
    """Products a second: the best of `rounds`, or, where one of a sixteenth of the rows is hopeless, what it says."""
    rows, inner, columns = PRODUCT
    a, b = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)

    def seconds(of: torch.Tensor) -> float:
        started = time.perf_counter()
        torch.mm(of, b)
        return time.perf_counter() - started

    part = seconds(a[: rows // 16]) * 16
    if part > HOPELESS_SECONDS:
        return 1 / part
    return 1 / min([seconds(a) for _ in range(rounds + 1)][1:])
