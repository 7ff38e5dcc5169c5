"""The fused graph as it stands, op by op."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from pagebinder.runtime.executables.base import input_names


class EagerExecutable:
    """Runs the GraphModule; slow and easy to debug (breakpoints, `gm.print_readable()`)."""

    name = "eager"
    is_opaque = False  # its ops can be seen one by one, see runtime/graphs

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.input_names = input_names(gm)

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            return self.gm(*(inputs[name] for name in self.input_names))
