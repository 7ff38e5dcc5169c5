"""The fused graph as it stands, op by op, on one stream or on two."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from pagebinder.runtime.executables.base import StepExecutable, input_names
from pagebinder.runtime.streams import Overlap


class EagerExecutable(StepExecutable):
    """Runs the GraphModule; slow and easy to debug (breakpoints, `gm.print_readable()`).

    `overlap`: let branches of it run side by side (`runtime/streams`).
    """

    name = "eager"
    is_opaque = False  # its ops can be seen one by one, see runtime/graphs

    def __init__(self, gm: GraphModule, overlap: Overlap | None = None) -> None:
        self.gm, self.overlap = gm, overlap
        self._run = gm if overlap is None else overlap.run_by(gm)
        self.input_names = input_names(gm)

    def _step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._run(*(inputs[name] for name in self.input_names))
