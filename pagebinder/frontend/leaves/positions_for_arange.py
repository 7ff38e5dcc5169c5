"""Positions of the call, for layers that number their rows by `torch.arange` while they are traced.

    row of a step      0   1   2   3         chunked prefill of positions 40 to 43
    torch.arange       0   1   2   3         wrong from the second step on, and in every batch
    positions         40  41  42  43         what the source computes with its cache

For the whole sequence that the source is defined on it is the same tensor, and the formula stays the source's own.
"""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode

from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf, restore_forward


class PositionsForArange(TorchFunctionMode):
    """`torch.arange(num_tokens)` answers the positions [1, num_tokens] of the call as [num_tokens].

    giver: the class that should have told the positions, for errors. num_answered: how often it was asked.

    Raises:
        CaptureError: an arange of something else, or no positions of one sequence.
    """

    def __init__(self, leaf: Leaf, positions: torch.Tensor | None, num_tokens, giver: str) -> None:
        super().__init__()
        self.leaf = leaf
        self.positions = positions
        self.num_tokens = num_tokens
        self.giver = giver
        self.num_answered = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.arange:
            return func(*args, **kwargs)
        if len(args) != 1 or set(kwargs) - {"device"} or args[0] != self.num_tokens:
            raise CaptureError(
                self.leaf._changed("it takes an arange that does not number the rows of the call")
            )
        if self.positions is None or self.positions.shape[0] != 1:
            raise CaptureError(self.leaf._changed(f"{self.giver} is not told the positions of one sequence"))
        self.num_answered += 1
        return self.positions[0]

    def require_answered(self, times: int) -> None:
        """Raises CaptureError: it was asked more or fewer times."""
        if self.num_answered != times:
            what = f"it numbers its rows {self.num_answered} times, not {times}"
            raise CaptureError(self.leaf._changed(what))


def number_by_positions(
    leaf: Leaf, giver: torch.nn.Module, modules: list[torch.nn.Module], times: int, undo: contextlib.ExitStack
) -> None:
    """Modules that take `hidden_states` first and number their rows so often are given the positions of the call.

    giver: the module around them that is told `position_ids`. undo: puts everything back.

    Raises:
        CaptureError: while tracing: they number their rows otherwise, or `giver` is not told positions.
    """
    kept: dict[str, torch.Tensor | None] = {}

    def keep_positions(module, args, kwargs):
        kept["positions"] = kwargs.get("position_ids")

    def numbered(forward):
        def forward_with_positions(*args, **kwargs):
            hidden_states = args[0] if args else kwargs["hidden_states"]
            mode = PositionsForArange(
                leaf, kept.get("positions"), hidden_states.shape[1], type(giver).__name__
            )
            with mode:
                out = forward(*args, **kwargs)
            mode.require_answered(times)
            return out

        return forward_with_positions

    undo.callback(giver.register_forward_pre_hook(keep_positions, with_kwargs=True).remove)
    undo.callback(giver.register_forward_hook(lambda *_: kept.clear(), always_call=True).remove)
    for module in modules:
        undo.callback(restore_forward, module, module.__dict__.get("forward"))
        module.forward = numbered(module.forward)
