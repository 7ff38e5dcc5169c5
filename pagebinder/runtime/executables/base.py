"""What every executable does: take a step's tensors by name, return logits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.fx import GraphModule


class Executable(Protocol):
    """A graph ready to run. `name` is its name in `CompileConfig.executable`."""

    name: str

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run one step: step metadata and caches by name -> logits [L, V]. Caches are updated in place."""
        ...


def input_names(gm: GraphModule) -> list[str]:
    """Names of a graph's inputs in call order."""
    return [n.target for n in gm.graph.nodes if n.op == "placeholder"]
