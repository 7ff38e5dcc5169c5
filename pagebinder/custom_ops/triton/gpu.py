"""What the GPU of a tensor can do; of tensors of the CPU: what the interpreter or a mere compiler assumes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

CAPABILITY_OF_NO_GPU = (0, 0)
MULTIPROCESSORS_OF_NO_GPU = 1
FP8_CAPABILITY = (8, 9)  # converts e4m3 in one instruction, and multiplies it
HOPPER = (9, 0)


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else CAPABILITY_OF_NO_GPU


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS_OF_NO_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def round_splits(splits: int) -> int:
    """At most `splits`, and one of few numbers (1, 2, 3, 4, 6, 8, 12, ...): a kernel is compiled for each."""
    power = 1 << (splits.bit_length() - 1)
    return power * 3 // 2 if power > 1 and splits >= power * 3 // 2 else power


def has_fp8(device: torch.device) -> bool:
    """Whether kernels may use the type float8e4nv."""
    return capability(device) >= FP8_CAPABILITY


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
