"""What every executable does: take a step's tensors by name, return logits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.fx import GraphModule

from pagebinder.ambient import inference
from pagebinder.custom_ops.cpu.torch_threads import torch_threads
from pagebinder.forks import use_threads


class Executable(Protocol):
    """A graph ready to run. `name` is its name in `CompileConfig.executable`. `limits_torch`: while it runs, torch's
    own loops stay in the thread that calls it (torch_share.py)."""

    name: str
    limits_torch: bool

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run one step: step metadata and caches by name -> logits [L, V]. Caches are updated in place.

        Raises ForkedProcessError where torch's threads would be waited for: pagebinder/forks.py."""
        ...


class StepExecutable:
    """Runs `_step` without gradients, and with the threads that it needs."""

    limits_torch = False

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with inference():
            if not self.limits_torch:
                use_threads("a step of a model that leaves much to torch's own ops")
                return self._step(inputs)
            with torch_threads(limited=True):
                return self._step(inputs)

    def _step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


def input_names(gm: GraphModule) -> list[str]:
    """Names of a graph's inputs in call order."""
    return [n.target for n in gm.graph.nodes if n.op == "placeholder"]
