"""The fused graph compiled ahead of time by AOTInductor: a shared library that runs without Python.

    model.so     `run(step inputs, caches, weights) -> logits`; sizes of a step are symbols, as in `inductor`
    model.json   the calls of our own ops that it makes, which libtorch looks up by name and makes for it

Weights are inputs of the library, not constants in it: it reads them where the caller has them, and does not grow
with the model. libtorch cannot pass an empty list of tensors to an op, so such a call goes through an op without that
argument (see aot_ops.py).
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.fx import GraphModule

from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.cpu import compiler
from pagebinder.errors import ArtefactError
from pagebinder.runtime.executables.aot_ops import adapter, native_problem
from pagebinder.runtime.executables.base import StepExecutable
from pagebinder.runtime.executables.inductor import lift_weights

LIBRARY = "model.so"
CALLS = "model.json"
# What AOTInductor calls the second file.
GENERATED_CALLS = "*.wrapper.json"


class AOTExecutable(StepExecutable):
    """Runs a compiled library.

    Args:
        folder: where `compile_aot` wrote it. input_names: the graph's inputs in call order. weights: the tensors that
            it reads, in that order.
    Raises:
        RuntimeError, OSError: the library cannot be loaded. KeyError, ValueError: its list of calls is damaged.
    """

    name = "aot"

    def __init__(self, folder: Path, input_names: list[str], weights: Iterable[torch.Tensor]) -> None:
        self.folder = folder
        self.input_names = input_names
        self.called_ops = called_ops(folder)
        self._weights = [w.detach() for w in weights]
        self._runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / LIBRARY), 1)

    def _step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._runner.run([*(inputs[name] for name in self.input_names), *self._weights])[0]

    def save(self, folder: Path) -> None:
        """Copy the library to a new folder. Raises OSError."""
        folder.mkdir(parents=True)
        for name in (LIBRARY, CALLS):
            shutil.copy(self.folder / name, folder / name)


def compile_aot(gm: GraphModule, folder: Path) -> None:
    """Compile a graph (tens of seconds) into a new folder.

    Raises:
        ArtefactError: the graph calls an op that needs Python, or AOTInductor cannot compile it.
        CompilerNotFoundError: no C++ compiler.
    """
    compiler.find_compiler()
    problems = {problem: None for node in gm.graph.nodes if (problem := native_problem(node.target))}
    if problems:
        raise ArtefactError(f'executable="aot": a program without Python cannot call {"; ".join(problems)}.')
    lifted, _ = lift_weights(gm)
    _leave_out_empty_lists(lifted)
    examples = tuple(n.meta["val"] for n in lifted.graph.nodes if n.op == "placeholder")
    with tempfile.TemporaryDirectory() as work:
        options = {
            "aot_inductor.output_path": str(Path(work) / LIBRARY),
            "aot_inductor.package": False,
            "cpp.vec_isa_ok": True if cpu_build.compiler_is_proven() else None,  # see InductorExecutable
        }
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch's, about itself
                library = torch._inductor.aot_compile(lifted, examples, options=options)
        except Exception as error:
            raise ArtefactError(
                f'executable="aot": AOTInductor cannot compile this model: {error}'
            ) from error
        calls = list(Path(work).glob(GENERATED_CALLS))
        folder.mkdir(parents=True)
        shutil.copy(library, folder / LIBRARY)
        (folder / CALLS).write_text(calls[0].read_text() if calls else '{"nodes": []}', encoding="utf-8")


def called_ops(folder: Path) -> list[str]:
    """Names of the ops that libtorch calls for the library, our own and torch's."""
    nodes = json.loads((folder / CALLS).read_text(encoding="utf-8"))["nodes"]
    return sorted({node["node"]["target"] for node in nodes})


def _leave_out_empty_lists(gm: GraphModule) -> None:
    """Call ops with empty lists of tensors through their adapters."""
    for node in gm.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "aten":
            continue
        arguments = node.target._schema.arguments
        given = dict(zip((a.name for a in arguments), node.args)) | dict(node.kwargs)
        empty = tuple(a.name for a in arguments if str(a.type) == "List[Tensor]" and given.get(a.name) == [])
        if empty:
            node.target = adapter(node.target, empty)
            positional = [a.name for a in arguments if not a.kwarg_only and a.name not in empty]
            node.args = tuple(given.pop(name) for name in positional if name in given)
            node.kwargs = {name: value for name, value in given.items() if name not in empty}
    gm.recompile()
