"""How far a model's own outputs move where each of its weights is off by one rounding: two right orders of sums may
be that far apart. Most models move by some units in the last place of float32 (measured on tiny models: 1e-5 of the
spread of the logits), a gated delta net with random weights by a hundred times as much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from pagebinder.compiler.verify_memory import room_for_copy
from pagebinder.compiler.verify_runs import World
from pagebinder.frontend.module_copy import copied
from pagebinder.frontend.python_state import evaluation_mode
from pagebinder.passes.graph_values import REDUCED
from pagebinder.passes.verifier import NOISE_FACTOR, difference, spread_of

Rows = list[torch.Tensor]


def own_noise(
    world: World, expected: Rows, run: Callable[[torch.nn.Module], Rows], notes: list[str]
) -> Callable[[], float]:
    """A function that measures it when it is first called, in units of the spread of `expected`, and notes it.

    Args:
        expected: what the world's module returns for each sequence.
        run: the same of another module.
    Returns 0 in reduced precision, whose tolerances are wide, and where there is no memory for a copy of the weights.
    """

    @functools.cache
    def noise() -> float:
        if world.dtype in REDUCED or not room_for_copy(world.module, world.dtype):
            return 0.0
        module = copied(world.module)
        _round_otherwise(module)
        with evaluation_mode(module):
            moved = run(module)
        spread = spread_of(torch.cat(expected))
        found = max(difference(*pair, spread=spread).relative for pair in zip(moved, expected, strict=True))
        notes.append(
            f"verify: the source model's own outputs move by {found:.2g} of their spread where its weights "
            f"({world.name}) are off by one rounding; its graphs may differ by {NOISE_FACTOR} times that"
        )
        return found

    return noise


def _round_otherwise(module: torch.nn.Module, seed: int = 0) -> None:
    """Move every weight up or down by one unit in the last place, at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                up = torch.randint(0, 2, parameter.shape, generator=generator, device="cpu") * 2 - 1
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps * up.to(parameter))
