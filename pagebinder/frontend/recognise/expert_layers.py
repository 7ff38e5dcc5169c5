"""An expert as its layers: what `moe_experts` takes of it, found from its output.

linear(gated_activation(linear(x, G), linear(x, U), activation=a), D)      [G, U], a gated
linear(gated_activation(halves of linear(x, GU)), D)                       [GU], a gated
linear(a(linear(x, U)), D)                                                 [U], a
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from pagebinder.custom_ops.moe.gates import Gate
from pagebinder.graph_tools import arg, aten, is_call, size_text, val

_ACTIVATIONS = {
    aten.silu.default: "silu", aten.gelu.default: "gelu", aten.relu.default: "relu", aten.sigmoid.default: "sigmoid",
}  # fmt: skip
_GATED = torch.ops.pagebinder.gated_activation.default


@dataclass(frozen=True)
class ExpertLayers:
    """x [T, C], nodes of weights: those joined to the first projection, and the second; biases or none."""

    x: Node
    gate: Gate
    ups: tuple[Node, ...]
    down: Node
    up_biases: tuple[Node, ...]
    down_bias: Node | None

    @property
    def up(self) -> Node:
        return self.ups[0]

    def parts(self, name: str) -> list[Node]:
        """What is joined to one tensor of an expert."""
        biases = [] if self.down_bias is None else [self.down_bias]
        return {"up": [*self.ups], "down": [self.down], "up_bias": [*self.up_biases], "down_bias": biases}[
            name
        ]

    def kind(self) -> tuple:
        """The same for experts that differ in their weights alone."""
        weights = (*self.ups, self.down, *self.up_biases, *self.parts("down_bias"))
        shapes = [(str(val(n).dtype), *map(size_text, val(n).shape)) for n in weights]
        return self.x, self.gate, len(self.ups), len(self.up_biases), shapes


def layers_of(out: Node, plain: Callable[[Node], Node]) -> ExpertLayers | None:
    """None: it is no expert of two projections. `plain`: walks before what renames dimensions of size one."""
    down = _linear(plain(out))
    if down is None:
        return None
    hidden, down_weight, down_bias = down
    found = _gated(plain(hidden), plain) or _not_gated(plain(hidden), plain)
    if found is None:
        return None
    gate, ups = found
    xs = {plain(x) for x, _, _ in ups}
    biases = tuple(bias for _, _, bias in ups if bias is not None)
    if len(xs) > 1 or len(biases) not in (0, len(ups)) or bool(biases) != (down_bias is not None):
        return None
    return ExpertLayers(xs.pop(), gate, tuple(w for _, w, _ in ups), down_weight, biases, down_bias)


def _linear(node) -> tuple[Node, Node, Node | None] | None:
    """(x, W, b) of a layer whose weights are those of a module."""
    if not is_call(node, aten.linear.default):
        return None
    x, weight, bias = node.args[0], node.args[1], arg(node, 2, "bias")
    weights = [n for n in (weight, bias) if n is not None]
    same = all(n.op == "get_attr" and val(n).dtype is val(node).dtype for n in weights)
    return (x, weight, bias) if same and val(weight).dim() == 2 else None


def _gated(node: Node, plain: Callable[[Node], Node]) -> tuple[Gate, list] | None:
    if not is_call(node, _GATED):
        return None
    gate = Gate(activation=node.kwargs["activation"])
    halves = [plain(n) for n in node.args[:2]]
    if all(is_call(half, operator.getitem) for half in halves):
        return _halves(gate, halves, plain)
    ups = [_linear(half) for half in halves]
    return None if None in ups or val(ups[0][1]).shape != val(ups[1][1]).shape else (gate, ups)


def _halves(gate: Gate, halves: list[Node], plain: Callable[[Node], Node]) -> tuple[Gate, list] | None:
    """Gate and up as halves of one projection, the gate first."""
    split = halves[0].args[0]
    is_split = is_call(split, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
    if (
        not is_split
        or [half.args for half in halves] != [(split, 0), (split, 1)]
        or len(split.meta["val"]) != 2
    ):
        return None
    last = val(split.args[0]).dim() - 1
    up = _linear(plain(split.args[0]))
    return (gate, [up]) if up is not None and arg(split, 2, "dim", 0) % (last + 1) == last else None


def _not_gated(node: Node, plain: Callable[[Node], Node]) -> tuple[Gate, list] | None:
    if not is_call(node, *_ACTIVATIONS):
        return None
    name = _ACTIVATIONS[node.target]
    if name == "gelu" and arg(node, 1, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    up = _linear(plain(node.args[0]))
    return None if up is None else (Gate(activation=name, gated=False), [up])
