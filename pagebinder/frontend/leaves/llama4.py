"""Leaf: the query temperature of Llama 4's layers without RoPE, which follows positions and not row numbers.

The source scales queries by a function of `torch.arange(tokens)` plus what its own cache holds. Captured without
that cache, row i of any step would count as position i. While capturing, `torch.arange` inside these layers'
forward answers the positions of the call instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.positions_for_arange import number_by_positions

DECODER_LAYER = "Llama4TextDecoderLayer"


@dataclass(frozen=True, kw_only=True)
class QueryTemperature(Leaf):
    """Swaps no function of the modeling file: the layers themselves are told their positions."""

    def modules(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The attention modules whose queries are scaled by their row number, by path."""
        return {path: m for path, m in Leaf.modules(self, model).items() if self._is_tuned(m)}

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        """The layers patched for the duration, and put back as they were.

        Raises:
            CaptureError: the layers are not built as expected; while tracing: they number their rows otherwise.
        """
        attentions = {id(m): path for path, m in self.modules(model).items()}
        layers = [m for m in model.modules() if type(m).__name__ == DECODER_LAYER]
        layers = [m for m in layers if id(getattr(m, "self_attn", None)) in attentions]
        if len(layers) != len(attentions):
            raise CaptureError(self._changed(f"not every tuned attention is in a {DECODER_LAYER}"))
        with contextlib.ExitStack() as undo:
            for layer in layers:
                number_by_positions(self, layer, [layer.self_attn], 1, undo)
            yield

    def _is_tuned(self, module: torch.nn.Module) -> bool:
        try:
            return bool(module.attn_temperature_tuning) and not module.use_rope
        except AttributeError as error:
            raise CaptureError(self._changed(str(error))) from error


QUERY_TEMPERATURE = QueryTemperature(
    name="query temperature",
    classes=("Llama4TextAttention",),
    functions={},
    emits=(),
    seen_on=("5.23",),
)
