"""Compiled pieces: where the executable is compiled code, so is what is captured between two breaks.

    norm  qkv  rope | attention | proj  norm  mlp  norm  qkv  rope | attention | ...
    `-- program 1 --'  `- called -'  `------- program 2 ----------'             `- program 2 again

Programs are for tensors of certain strides. Values that are carried lie row by row, whatever made them; what is
computed from them lies as that makes it, which is found by running the pieces over tensors without values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule

from pagebinder.errors import GraphCaptureError
from pagebinder.runtime.executables.inductor import lift_weights
from pagebinder.runtime.graphs.capture import carried_values
from pagebinder.runtime.graphs.pieces import Piece


class Compiler(Protocol):
    """`Executable.pieces` of executables that are compiled code."""

    name: str

    def problem(self, device: torch.device) -> str | None: ...

    def compile(self, gm: GraphModule, examples: Sequence[Any]) -> Any: ...


def compile_pieces(
    gm: GraphModule, pieces: Sequence[Piece], compiler: Compiler, device: torch.device
) -> None:
    """Let captured pieces of a graph run as compiled code, or say why they run op by op.

    Raises:
        GraphCaptureError: the compiler fails on a piece.
    """
    if (problem := compiler.problem(device)) is not None:
        for piece in pieces:
            piece.runs_as = f"op by op ({problem})" if piece.is_captured else piece.runs_as
        return
    carried = carried_values(pieces)
    values = {n.name: n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"}
    for number, piece in enumerate(pieces):
        examples = [values[name] for name in piece.inputs]
        if piece.is_captured:
            try:
                piece.run = compiler.compile(piece.gm, examples)
            except RuntimeError as error:
                what = f"piece {number} of a step, which makes {', '.join(piece.outputs) or 'nothing'}"
                raise GraphCaptureError(f"{compiler.name} fails on {what}: {error}") from error
            piece.runs_as, piece.is_compiled = f"compiled by {compiler.name}", True
        for name, value in zip(piece.outputs, _traced(piece, examples), strict=True):
            is_carried = name in carried and isinstance(value, torch.Tensor)
            values[name] = _row_by_row(value) if is_carried else value


def _traced(piece: Piece, examples: Sequence[Any]) -> list[Any]:
    """What a piece returns for such inputs, as tensors without values."""
    lifted, _ = lift_weights(piece.gm)
    weights = [n.meta["val"] for n in lifted.graph.nodes if n.op == "placeholder"][len(examples) :]
    mode = next(x.fake_mode for x in examples if isinstance(x, torch.Tensor))
    with enable_python_dispatcher(), mode, torch.no_grad():  # see graph_tools.set_val
        return list(lifted(*examples, *weights))


def _strides(value: torch.Tensor) -> list[str]:
    return [str(stride) for stride in value.stride()]


def _row_by_row(value: torch.Tensor) -> torch.Tensor:
    """The value as `CarriedValues` keeps it."""
    wanted = [1]
    for size in reversed(value.shape[1:]):
        wanted.insert(0, wanted[0] * size)
    if _strides(value) == [str(stride) for stride in wanted[: value.dim()]]:
        return value
    with value.fake_mode:
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)
