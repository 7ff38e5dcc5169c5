"""How far two right graphs of a model may be apart, where that is more than most models need.

float32, float64        a few times what the model's own outputs move where each weight is off by one rounding.
                        Most models move by some units in the last place (measured on tiny models: 1e-5 of the
                        spread of the logits), a gated delta net with random weights by a hundred times as much
reduced precision       as far as the model's own outputs are from what it computes in float32 (most: below 0.2;
                        a Gemma 4 with random weights: 1.6)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from pagebinder.compiler.verify_memory import room_for_copy
from pagebinder.compiler.verify_runs import World
from pagebinder.frontend.leaves import remake_tables
from pagebinder.frontend.module_copy import copied
from pagebinder.frontend.python_state import evaluation_mode
from pagebinder.frontend.source import source_from_module
from pagebinder.passes.graph_values import REDUCED
from pagebinder.passes.verifier import difference, spread_of

# Roundings of all values of a step, not of weights alone. Ten times would change nothing for well-conditioned models.
NOISE_FACTOR = 4

Rows = list[torch.Tensor]


def own_tolerance(
    world: World, expected: Rows, run: Callable[[torch.nn.Module], Rows], notes: list[str]
) -> Callable[[], float]:
    """A function that measures it when it is first called, in units of the spread of `expected`, and notes it.

    Args:
        expected: what the world's module returns for each sequence.
        run: the same of another module, which may be of another dtype.
    Returns 0 where there is no memory for another copy of the weights, or the model's code takes no other dtype.
    """

    @functools.cache
    def tolerance() -> float:
        if world.dtype in REDUCED:
            return _measured(
                torch.float32, "is {:.2g} of the spread of its outputs from what it computes in float32"
            )
        moves = "moves by {:.2g} of the spread of its outputs where its weights are off by one rounding"
        return NOISE_FACTOR * _measured(world.dtype, moves)

    def _measured(dtype: torch.dtype, words: str) -> float:
        if not room_for_copy(world.module, dtype):
            return 0.0
        if dtype is world.dtype:
            module = copied(world.module)
            _round_otherwise(module)
        else:
            module = converted_copy(world.module, dtype)
        try:
            with evaluation_mode(module):
                others = run(module)
        except Exception:  # of code that holds a dtype
            if dtype is world.dtype:
                raise
            return 0.0
        spread = spread_of(torch.cat(expected))
        pairs = zip(others, expected, strict=True)
        found = max(difference(*pair, spread=spread).relative for pair in pairs)
        notes.append(f"verify: the source model, with {world.name} weights, {words.format(found)}")
        return found

    return tolerance


def converted_copy(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy of a source model in another dtype."""
    module = source_from_module(module, dtype=dtype).module
    remake_tables(module)
    return module


def _round_otherwise(module: torch.nn.Module, seed: int = 0) -> None:
    """Move every weight up or down by one unit in the last place, at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                up = torch.randint(0, 2, parameter.shape, generator=generator, device="cpu") * 2 - 1
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps * up.to(parameter))
