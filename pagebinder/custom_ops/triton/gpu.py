"""What the GPU of a tensor can do; of tensors of the CPU: what the interpreter or a mere compiler assumes.

Functions of kernels can run over tensors without memory, with no launch, to see what they allocate (`rehearsal`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

CAPABILITY_OF_NO_GPU = (0, 0)
MULTIPROCESSORS_OF_NO_GPU = 1
FP8_CAPABILITY = (8, 9)  # converts e4m3 in one instruction, and multiplies it
HOPPER = (9, 0)
HOPPERS_MULTIPROCESSORS = 132
_rehearsed = threading.local()  # `gpu`: (capability, multiprocessors) in a rehearsal of this thread
_settled: set[int] = set()  # see settle_key


def capability(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return getattr(_rehearsed, "gpu", (CAPABILITY_OF_NO_GPU, 0))[0]


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return getattr(_rehearsed, "gpu", ((), MULTIPROCESSORS_OF_NO_GPU))[1]
    return torch.cuda.get_device_properties(device).multi_processor_count


def round_splits(splits: int) -> int:
    """At most `splits`, and one of few numbers (1, 2, 3, 4, 6, 8, 12, ...): a kernel is compiled for each."""
    power = 1 << (splits.bit_length() - 1)
    return power * 3 // 2 if power > 1 and splits >= power * 3 // 2 else power


def has_fp8(device: torch.device) -> bool:
    """Whether kernels may use the type float8e4nv."""
    return capability(device) >= FP8_CAPABILITY


@contextmanager
def rehearsal(device: torch.device) -> Iterator[None]:
    """Here no kernel is launched by this thread, and tensors of other devices are taken for those of a GPU: of
    `device` if it is there, else of a Hopper."""
    there = device.type == "cuda" and torch.cuda.is_available()
    _rehearsed.gpu = (
        (capability(device), multiprocessors(device)) if there else (HOPPER, HOPPERS_MULTIPROCESSORS)
    )
    try:
        yield
    finally:
        del _rehearsed.gpu


def leave_out_in_rehearsals(kernel) -> None:
    """A kernel in Triton, whose launches a rehearsal leaves out."""
    run = kernel.run
    if getattr(run, "is_left_out", False):
        return

    @functools.wraps(run)
    def run_unless_rehearsed(*operands, **options):
        return None if hasattr(_rehearsed, "gpu") else run(*operands, **options)

    run_unless_rehearsed.is_left_out = True
    kernel.run = run_unless_rehearsed


def settle_key(function) -> None:
    """A function in Triton, or a kernel: the key of what is compiled of it, for the cache on disk, once and for all.

    Triton's key (3.6, 3.7) is another where the keys of functions that are called were asked for before. Asked for
    from the bottom up they are the same in every process, and nothing is compiled twice.
    """
    has_key = hasattr(type(function), "cache_key")  # of the function itself: that would ask for it
    if not has_key or id(function) in _settled:
        return
    import triton.language

    _settled.add(id(function))
    names, known = function.fn.__code__.co_names, function.fn.__globals__
    for name in names:
        settle_key(known.get(name))
        settle_key(getattr(triton.language, name, None))
    function.cache_key  # noqa: B018  (computed, and kept)


def on_its_device(function: Callable) -> Callable:
    """`function` with the GPU of its first tensor as the current one: that is where Triton launches, whatever the
    device of operands."""

    @functools.wraps(function)
    def call(*operands, **options):
        device = _first_tensor(operands).device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*operands, **options)
        with torch.cuda.device(device):
            return function(*operands, **options)

    return call


def _first_tensor(operands: Sequence) -> torch.Tensor:
    """In order; operands may be lists of tensors, too."""
    given = (
        x for operand in operands for x in (operand if isinstance(operand, (list, tuple)) else (operand,))
    )
    return next(x for x in given if isinstance(x, torch.Tensor))
