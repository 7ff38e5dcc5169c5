"""Linear layers of ours in a graph, their weights plain or quantised, as passes that join some of them see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from pagebinder.custom_ops.providers import OpNeed, registered_providers
from pagebinder.graph_tools import arg, dtype_name, is_call, val

LINEAR = torch.ops.pagebinder.linear.default
QUANTIZED = torch.ops.pagebinder.quantized_linear.default


@dataclass(frozen=True)
class LinearCall:
    """One layer. `weight`: (W,) or (codes, scale). `format`: of the codes, None for a plain weight."""

    x: Node
    weight: tuple[Node, ...]
    bias: Node | None
    format: str | None

    @property
    def options(self) -> dict[str, str]:
        """Keyword arguments of an op that joins such layers."""
        return {} if self.format is None else {"format": self.format}

    def joined_op(self, name: str) -> torch._ops.OpOverload:
        """The op that joins layers like this one: `name`, or its form for quantised weights."""
        return getattr(torch.ops.pagebinder, name if self.format is None else f"quantized_{name}").default


def linear_call(node: Node) -> LinearCall | None:
    """What a node computes, if it is a linear layer of ours."""
    if is_call(node, LINEAR):
        return LinearCall(node.args[0], node.args[1:2], arg(node, 2, "bias"), None)
    if is_call(node, QUANTIZED):
        return LinearCall(node.args[0], node.args[1:3], arg(node, 3, "bias"), node.kwargs["format"])
    return None


def reason_against_joining(call: LinearCall, name: str) -> str | None:
    """Why no kernel of ours computes layers like this one in one call of `name`, or None.

    Plain layers are ours where they have such a kernel (place_linears.py).
    """
    if call.format is None:
        return None
    op, device = call.joined_op(name)._opname, val(call.x).device.type
    need = OpNeed(op=op, device="cpu" if device == "meta" else device, dtype=dtype_name(val(call.x)))
    reasons = registered_providers()["cpu"].reasons_against(need)
    return f"no kernel of ours for {op}: {'; '.join(reasons)}" if reasons else None


def fetch_before(place: Node, *parameters: Node) -> None:
    """Fetch parameters before `place`, wherever the graph fetched them."""
    earlier = set()
    for node in place.graph.nodes:
        if node is place:
            break
        earlier.add(node)
    for node in parameters:
        if node not in earlier:
            place.prepend(node)
