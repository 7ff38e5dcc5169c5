"""Which `Gate` a module's own code between the two projections is, found by running it.

A list of class names would say what was read once; the numbers say what this module computes. The code is run on
rows of many magnitudes and on both sides of every number that the module holds, and a candidate must agree on all.
Rounding decides between candidates that are the same function: the one nearest in the module's own dtype is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch

from pagebinder.custom_ops.moe.gates import ACTIVATIONS, Gate

NUM_ROWS, INNER = 96, 8
RTOL, ATOL = 1e-5, 1e-6
QUICK_GELU_ALPHA = 1.702


@torch.no_grad()
def find_gate(
    own: Callable[[torch.Tensor], torch.Tensor],
    *,
    gated: bool,
    numbers: Iterable[float],
    dtype: torch.dtype,
    guesses: Iterable[Gate] = (),
) -> Gate | None:
    """The gate that `own` (h [S, J] -> [S, I]) is, or None.

    Args:
        numbers: what may be a limit or an alpha: the numbers that the module holds.
        dtype: the module's, for the choice between equal functions.
        guesses: gates of similar modules; one that agrees to the last bit ends the search.
    Raises:
        whatever `own` raises on rows of its own choice of width.
    """
    numbers = sorted({float(n) for n in numbers if 0 < n < 1e4})
    rows = _rows(gated, numbers)
    expected, in_dtype = own(rows), own(rows.to(dtype)).float()

    def error(gate: Gate) -> float:
        difference = (gate(rows.to(dtype)).float() - in_dtype).abs()
        return float(difference.nan_to_num(0.0).max())  # both overflow in a narrow dtype: no difference

    def is_same(gate: Gate) -> bool:
        got = gate(rows)
        return got.shape == expected.shape and torch.allclose(got, expected, rtol=RTOL, atol=ATOL)

    for gate in guesses:
        if gate.gated == gated and is_same(gate) and error(gate) == 0:
            return gate
    return min(filter(is_same, _candidates(gated, numbers)), key=error, default=None)


def _candidates(gated: bool, numbers: list[float]) -> Iterator[Gate]:
    """Plain ones first: of two that agree to the last bit, the first is taken."""
    plain = [{"activation": name} for name in ACTIVATIONS if name != "swish"]
    swish = [{"activation": "swish", "alpha": alpha} for alpha in (QUICK_GELU_ALPHA, *numbers)]
    if not gated:
        for activation, wide in itertools.product(plain + swish, (False, True)):
            yield Gate(gated=False, in_float32=wide, **activation)
        return
    options = itertools.product((False, True), (None, *numbers), (0.0, 1.0), (False, True), plain + swish)
    for wide, limit, offset, interleaved, activation in options:
        yield Gate(in_float32=wide, limit=limit, up_offset=offset, interleaved=interleaved, **activation)


def _rows(gated: bool, numbers: list[float]) -> torch.Tensor:
    """Rows of magnitudes 1e-3 to 1e4 and of twice each of `numbers`, float32, each value exact in bfloat16."""
    options = {"dtype": torch.float32, "device": "cpu"}
    beside = 2 * torch.tensor(numbers, **options).repeat_interleave(8)
    scales = torch.cat([torch.logspace(-3, 4, NUM_ROWS, **options), beside])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(scales), (2 if gated else 1) * INNER, generator=generator, **options)
    return (rows * scales[:, None]).bfloat16().float()
