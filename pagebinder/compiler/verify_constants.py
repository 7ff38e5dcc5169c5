"""Numbers that a source model makes tensors of while it runs, `torch.tensor(d**0.5, dtype=x.dtype)`: its graph has
them as they were rounded in the model's dtype, a copy of the model in float32 makes them anew.
"""

from __future__ import annotations

import contextlib

import torch
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from pagebinder.compiler.verify_runs import World
from pagebinder.graph_tools import attribute
from pagebinder.passes.graph_values import REDUCED

CREATORS = (torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.Tensor.new_tensor)


def as_captured(world: World, captured: GraphModule) -> contextlib.AbstractContextManager:
    """While it is entered, source models make the constants of the captured graph, if the world has wider ones."""
    return RoundedConstants(captured) if world.widen else contextlib.nullcontext()


class RoundedConstants(TorchFunctionMode):
    """While it is entered, such a tensor has the number of the graph's."""

    def __init__(self, captured: GraphModule) -> None:
        super().__init__()
        targets = {node.target for node in captured.graph.nodes if node.op == "get_attr"}
        tensors = (attribute(captured, target) for target in targets)
        self.constants = {(t.dtype, float(t)) for t in tensors if t.numel() == 1 and t.dtype in REDUCED}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in CREATORS and result.numel() == 1 and result.dtype is torch.float32:
            for dtype, constant in self.constants:
                if float(result.to(dtype)) == constant:
                    return torch.full_like(result, constant)
        return result
