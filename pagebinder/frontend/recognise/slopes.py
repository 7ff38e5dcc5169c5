"""ALiBi slopes as a constant of the graph, one for all layers that share them."""

from __future__ import annotations

import itertools

import torch
from torch.fx import GraphModule, Node

from pagebinder.graph_tools import fake_mode_of


class SlopeConstants:
    """Makes [H] float32 buffers in a graph, each at the first layer that needs it."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self._known: dict[tuple[float, ...], Node] = {}

    def node_of(self, slopes: torch.Tensor, device: torch.device) -> Node:
        key = tuple(slopes.tolist())
        if key not in self._known:
            self._known[key] = self._make(slopes, device)
        return self._known[key]

    def _make(self, slopes: torch.Tensor, device: torch.device) -> Node:
        names = (f"alibi_slopes_{i}" for i in itertools.count())
        name = next(n for n in names if not hasattr(self.gm, n))  # another pass may have made some
        self.gm.register_buffer(name, slopes.to(device), persistent=False)
        with self.gm.graph.inserting_before(next(iter(self.gm.graph.nodes))):
            node = self.gm.graph.get_attr(name)
        with fake_mode_of(self.gm.graph):  # from_tensor would make the number of heads dynamic
            node.meta["val"] = torch.empty(len(slopes), device=device)
        return node
