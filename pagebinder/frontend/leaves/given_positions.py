"""Positional embeddings that number the rows of a call: they look up the positions of the call instead.

Encoder-decoders of the BART family take no `position_ids`. Their positional embedding counts rows from what the
model's own cache holds, so captured without that cache, row i of any step would count as position i.

    row of a step         0   1   2   3      third step of a request that has 40 tokens, beside another at 7
    arange + past         0   1   2   3      wrong in every batch and in every step but the first
    positions            40  41  42   7      what the embedding's own argument `position_ids` is for

The embedding's forward stays the source's own (its offset, its table): only that argument is given.
Applies to modules named *PositionalEmbedding whose forward takes `position_ids` (BART, mBART, PLBART, Marian,
Pegasus, BigBird-Pegasus, Blenderbot, Whisper; seen in transformers 5.23).

A second kind counts the ids that are not padding, from padding_idx + 1 on, and has a table of sinusoids that grows by
itself (M2M100, NLLB-MoE, SeamlessM4T, FSMT). Its rows are looked up here: row padding_idx + 1 + p for position p.
Any other embedding is left alone, and the audit then refuses the model for counting rows.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import restore_forward
from pagebinder.frontend.numbering import grows_by_itself

SUFFIX = "PositionalEmbedding"
ARGUMENT = "position_ids"


class GivenPositions:
    """Where a call leaves its positions for the embeddings below it; counts who took them."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._positions: torch.Tensor | None = None
        self._taken: set[str] = set()

    @contextlib.contextmanager
    def of_call(self, positions: torch.Tensor) -> Iterator[None]:
        """Positions [T] for the embeddings called inside.

        Raises:
            CaptureError: one of the patched embeddings was not called, so its positions come from elsewhere.
        """
        self._positions, self._taken = positions, set()
        try:
            yield
        finally:
            self._positions = None
        unused = [name for name in self.names if name not in self._taken]
        if unused:
            raise CaptureError(f"{', '.join(unused)} was not called: where positions enter is not known.")

    def take(self, name: str) -> torch.Tensor:
        if self._positions is None:
            raise CaptureError(f"{name} was called outside of the call that gives it positions.")
        self._taken.add(name)
        return self._positions


def takes_positions(module: torch.nn.Module) -> bool:
    """Is this a positional embedding that numbers rows, unless it is told the positions?"""
    named = type(module).__name__.endswith(SUFFIX)
    return named and ARGUMENT in inspect.signature(type(module).forward).parameters


@contextlib.contextmanager
def given_positions(model: torch.nn.Module) -> Iterator[GivenPositions]:
    """Patch the positional embeddings of `model` (an encoder or a decoder), and put them back as they were."""
    modules = {name: m for name, m in model.named_modules() if takes_positions(m) or grows_by_itself(m)}
    given = GivenPositions(list(modules))
    with contextlib.ExitStack() as undo:
        for name, module in modules.items():
            before = module.__dict__.get("forward")  # None: the class's own, found again when ours is gone
            if grows_by_itself(module):
                module.forward = functools.partial(_looked_up, module, given, name)
            else:
                module.forward = functools.partial(_forward, module.forward, given, name)
            undo.callback(restore_forward, module, before)
        yield given


def _forward(forward, given: GivenPositions, name: str, *args, **kwargs):
    """The source's forward with the positions of the call, [T]."""
    return forward(*args, **{**kwargs, ARGUMENT: given.take(name)})


def _looked_up(module: torch.nn.Module, given: GivenPositions, name: str, *args, **kwargs):
    """[1, T, C]: the rows of a growing table at the positions of the call; ids, states and lengths are not needed."""
    table = module.weights if hasattr(module, "weights") else module.weight
    return table.index_select(0, given.take(name) + module.padding_idx + 1).unsqueeze(0)
