"""Pieces of a graph that is cut for capture, compiled by inductor: equal ones once.

    layer 1   norm(x, w1) -> linear(., w2) -> ...     `-- one program, called with the
    layer 2   norm(x, w3) -> linear(., w4) -> ...     `-- weights of each layer

Two pieces are equal if they make the same calls with the same numbers on tensors of the same shapes, strides and
dtypes. Inductor's own cache does not see that: names are part of its key, and it traces before it looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pagebinder.custom_ops.cpu import compiler


@dataclass(frozen=True)
class CompiledPiece:
    """Called as the piece: inputs in order -> results in order. `program`: what equal pieces share."""

    program: Callable[..., Sequence]
    weights: tuple[torch.Tensor, ...]

    def __call__(self, *args: Any) -> tuple:
        return tuple(self.program(*args, *self.weights))


class PieceCompiler:
    """Compiles pieces of one graph. Weights are inputs of the programs, so nothing is copied.

    name: of the executable whose pieces they are. seconds: spent so far.
    """

    name = "inductor"

    def __init__(self) -> None:
        self.seconds = 0.0
        self._programs: dict[str, Callable[..., Sequence]] = {}

    def problem(self, device: torch.device) -> str | None:
        """Why nothing can be compiled for a device; None: it can."""
        if device.type != "cpu":
            return None
        problem = compiler.problem()
        return None if problem is None else f"inductor needs a C++ compiler: {problem}"

    def compile(self, gm: GraphModule, examples: Sequence[Any]) -> CompiledPiece:
        """Compile a piece. `examples`: a tensor without values, or a symbolic size, for each of its inputs."""
        # Imported here: that module's executable has a compiler of pieces.
        from pagebinder.runtime.executables.inductor import compile_lifted, lift_weights

        start = time.perf_counter()
        lifted, weights = lift_weights(gm)
        inputs = [n for n in lifted.graph.nodes if n.op == "placeholder"]
        for node, example in zip(inputs, examples):
            node.meta["val"] = example
        key = _what_is_computed(lifted)
        if key not in self._programs:
            self._programs[key] = compile_lifted(lifted, [n.meta["val"] for n in inputs])
        self.seconds += time.perf_counter() - start
        return CompiledPiece(self._programs[key], tuple(weights))


class _Number:
    """Stands for a node, by its place."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def _what_is_computed(gm: GraphModule) -> str:
    """A graph as text without names: calls by target and operands by place, inputs by what they look like."""
    places: dict[Node, _Number] = {}
    lines = []
    for node in gm.graph.nodes:
        operands = torch.fx.node.map_arg((node.args, node.kwargs), places.__getitem__)
        what = _looks(node.meta["val"]) if node.op == "placeholder" else f"{node.target} {operands!r}"
        lines.append(f"{node.op} {what}")
        places[node] = _Number(len(places))
    return "\n".join(lines)


def _looks(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.device}"
    return repr(value)
