"""The one table of numeric tolerances: how far a kernel may be from its reference computed in float32.

A kernel accumulates in float32 and rounds its result once, so the relative part is half a unit in the last place
of the output type. The absolute part covers what happens inside, for operands of magnitude about 1: summation
order for float32 and float16, and for bfloat16 the rounding of softmax weights to bfloat16 before they multiply
V, which is 2^-8 times the weighted mean of |V| (below 2 for normal V) at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    rtol: float
    atol: float


TOLERANCES = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
    torch.float16: Tolerance(rtol=2**-11, atol=4e-5),
    torch.bfloat16: Tolerance(rtol=2**-8, atol=2**-7),
}
LSE = Tolerance(rtol=2e-6, atol=1e-5)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """`actual` (any float type) against `expected` in float32 or wider, with the tolerance of actual's dtype."""
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance.rtol, atol=tolerance.atol)


def assert_lse_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Log-sum-exps: float32 whatever the operands; infinities must agree."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=LSE.rtol, atol=LSE.atol)
