"""What a proof found as a constant of the graph, one for all layers that share it: slopes, tables by distance.

What is learned is made of its parameter in the graph: it is the same in every step, whatever its values.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch.fx import GraphModule, Node

from pagebinder.frontend.distance_proof import DistanceBias, Learned, Slopes
from pagebinder.graph_tools import aten, fake_mode_of, insert_call, val


class BiasConstants:
    """Makes slopes [H] or tables [H, N] in a graph, each at the first layer that needs it."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self._known: dict[tuple, Node] = {}

    def node_of(self, proven: Slopes | DistanceBias, device: torch.device) -> Node:
        if isinstance(proven.values, Learned):
            return self._of_parameter(proven.values, device, wide=isinstance(proven, Slopes))
        kind = "alibi_slopes" if isinstance(proven, Slopes) else "bias_by_distance"
        return self._once(kind, proven.values, device)

    def _of_parameter(self, learned: Learned, device: torch.device, *, wide: bool) -> Node:
        """The entries of the parameter times the factor, in the shape of `entries`; `wide`: in float32."""
        parameter, entries = learned.parameter, learned.entries
        key = (parameter, learned.factor, learned.outer, wide, *_contents(entries))
        if key not in self._known:
            flat = self._once("entries_by_distance", entries.flatten(), device)
            emit = functools.partial(insert_call, self.gm.graph, parameter.next)
            values = emit(aten.reshape.default, (parameter, [-1]))
            if learned.has_zeros:
                values = emit(aten.constant_pad_nd.default, (values, [0, 1], 0.0))
            values = emit(aten.index_select.default, (values, 0, flat))
            if learned.factor != 1:
                values = emit(aten.mul.Tensor, (values, learned.factor))
            for dtype in (learned.dtype, torch.float32 if wide or learned.outer != 1 else learned.dtype):
                if val(values).dtype is not dtype:
                    values = emit(aten.to.dtype, (values, dtype))
            if learned.outer != 1:
                values = emit(aten.mul.Tensor, (values, learned.outer))
            self._known[key] = emit(aten.reshape.default, (values, list(entries.shape)))
        return self._known[key]

    def _once(self, kind: str, values: torch.Tensor, device: torch.device) -> Node:
        key = (kind, *_contents(values))
        if key not in self._known:
            self._known[key] = self._make(kind, values, device)
        return self._known[key]

    def _make(self, kind: str, values: torch.Tensor, device: torch.device) -> Node:
        names = (f"{kind}_{i}" for i in itertools.count())
        name = next(n for n in names if not hasattr(self.gm, n))  # another pass may have made some
        self.gm.register_buffer(name, values.to(device), persistent=False)
        with self.gm.graph.inserting_before(next(iter(self.gm.graph.nodes))):
            node = self.gm.graph.get_attr(name)
        with fake_mode_of(self.gm.graph):  # from_tensor would make the number of heads dynamic
            node.meta["val"] = torch.empty(values.shape, dtype=values.dtype, device=device)
        return node


def _contents(values: torch.Tensor) -> tuple:
    return tuple(values.shape), values.numpy().tobytes()
