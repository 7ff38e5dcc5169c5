"""What inductor made of a graph, kept as files: a short Python program, and the libraries of its fused loops.

    inductor's module                                        kept
    imports, autotuning, benchmark harness                   what `call` needs of them
    kernel_0 = async_compile.cpp_pybinding([...], "...")     kernel_0.so, which was built from it
    class Runner: def call(self, args): ...                  as it is

torch's own formats for this (`CompiledArtifact.save`, both of them) are pickles, and reading them imports its
compiler, which takes as long as importing torch. This makes the same calls and imports nothing.

A program is code, like any compiled model: run one only if its files are the ones that were written, and come from
someone you trust.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any

import torch

from pagebinder.runtime.executables.base import StepExecutable
from pagebinder.runtime.executables.piece_compiler import PieceCompiler

SOURCE_NAME = "program.py"
ENTRY = "call"
# Where inductor's kernels find the function that gives a tensor's address.
ADDRESS_VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
# Matrix products that inductor calls by a module of its own, which is slow to import, and that are torch's.
PLAIN_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


def assert_tensor_metadata(tensor, size, stride, dtype, op_name=None) -> None:
    """What programs ask of the results of custom ops from torch 2.14 on. Raises RuntimeError, AssertionError."""
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise RuntimeError(f"{op_name or 'an op'} gave {tensor.dtype}; its fake kernel said {dtype}")
    torch._C._dynamo.guards.assert_size_stride(tensor, size, stride, op_name)


# Functions of inductor's that are in modules which import its compiler.
HELPERS = {"assert_tensor_metadata": assert_tensor_metadata}


@dataclass(frozen=True)
class Program:
    """Source of `call(args: list) -> list of outputs`, and the libraries of the kernels that it calls by name."""

    source: str
    libraries: dict[str, Path]

    @classmethod
    def of_module(cls, module: ModuleType) -> Program | None:
        """The program of a module that inductor generated; None where it holds more than code (constants)."""
        tree = ast.parse(Path(module.__file__).read_text())
        kernels = {name: value for name, value in vars(module).items() if _is_kernel(value)}
        if any(isinstance(value, torch.Tensor) for value in vars(module).values()):
            return None
        kept = _needed(tree.body, {*kernels, *HELPERS})
        libraries = {name: Path(k.__self__.__file__) for name, k in kernels.items() if name in _names(kept)}
        return cls(ast.unparse(ast.Module(_without_slow_imports(kept), [])), libraries)

    def save(self, folder: Path) -> None:
        """Write program.py and the libraries. Raises OSError.

        A process that has loaded a library takes another one at the same path for that, and would run its kernels on
        tensors of other sizes: so a library's name says what is in it.
        """
        folder.mkdir(parents=True)
        (folder / SOURCE_NAME).write_text(self.source + "\n", encoding="utf-8")
        for name, library in self.libraries.items():
            digest = hashlib.sha256(library.read_bytes()).hexdigest()[:16]
            shutil.copy(library, folder / f"{name}.{digest}.so")

    @classmethod
    def read(cls, folder: Path) -> Program:
        """The program that `save` wrote. Raises OSError."""
        libraries = {path.name.partition(".")[0]: path for path in sorted(folder.glob("*.so"))}
        return cls((folder / SOURCE_NAME).read_text(encoding="utf-8"), libraries)

    def load(self) -> Callable[[list], list]:
        """Load the libraries and run the program's definitions; returns `call`. Raises ImportError, OSError."""
        address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr
        os.environ[ADDRESS_VARIABLE] = str(address)
        names: dict[str, Any] = HELPERS | {name: _kernel(path) for name, path in self.libraries.items()}
        exec(self._code(), names)
        return names[ENTRY]

    def _code(self) -> CodeType:
        return compile(self.source, SOURCE_NAME, "exec", dont_inherit=True, optimize=1)


class ProgramExecutable(StepExecutable):
    """Runs a kept program: what `InductorExecutable` runs, without the compiler.

    Args:
        input_names: the graph's inputs in call order. weights: the tensors that it reads, in that order.
    """

    name = "inductor"

    def __init__(self, program: Program, input_names: list[str], weights: Iterable[torch.Tensor]) -> None:
        self.program = program
        self.input_names = input_names
        self.pieces = PieceCompiler()  # needs the compiler, but only where captured steps are cut
        self._weights = tuple(w.detach() for w in weights)
        self._call = program.load()

    def _step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._call([*(inputs[name] for name in self.input_names), *self._weights])[0]


def _is_kernel(value: Any) -> bool:
    return isinstance(value, BuiltinFunctionType) and str(getattr(value.__self__, "__file__", "")).endswith(
        ".so"
    )


def _kernel(path: Path) -> Callable:
    """The function `kernel` of a library: an extension module of that name."""
    spec = importlib.util.spec_from_file_location(
        "kernel", path, loader=importlib.machinery.ExtensionFileLoader("kernel", str(path))
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def _needed(statements: list[ast.stmt], given: set[str]) -> list[ast.stmt]:
    """The statements that `call` depends on, in order; `given` names need no statement."""
    wanted, kept = {ENTRY}, set()
    grown = True
    while grown:
        grown = False
        for index, statement in enumerate(statements):
            if index not in kept and (_bound(statement) - given) & wanted:
                kept.add(index)
                wanted |= _names([statement])
                grown = True
    return [statements[index] for index in sorted(kept)]


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module defines."""
    match statement:
        case ast.Import() | ast.ImportFrom():
            return {(a.asname or a.name).partition(".")[0] for a in statement.names}
        case ast.Assign():
            return {target.id for target in statement.targets if isinstance(target, ast.Name)}
        case ast.ClassDef() | ast.FunctionDef():
            return {statement.name}
    return set()


def _names(statements: list[ast.stmt]) -> set[str]:
    """Names that statements read."""
    return {n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name)}


def _without_slow_imports(statements: list[ast.stmt]) -> list[ast.stmt]:
    """`extern_kernels` is torch itself where it only serves for plain products."""
    used = {
        node.attr
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "extern_kernels"
    }
    if not used or not used <= PLAIN_PRODUCTS:
        return statements
    others = [s for s in statements if "extern_kernels" not in _bound(s)]
    return [*ast.parse("import torch as extern_kernels").body, *others]
