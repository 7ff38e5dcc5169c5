"""Ways to run a fused graph: `eager` for debugging, `native` called from C++, `inductor` compiled once for every
number of tokens."""

from pagebinder.runtime.executables.aot import AOTExecutable
from pagebinder.runtime.executables.base import Executable, input_names
from pagebinder.runtime.executables.eager import EagerExecutable
from pagebinder.runtime.executables.inductor import InductorExecutable
from pagebinder.runtime.executables.native import NativeExecutable
from pagebinder.runtime.executables.program import ProgramExecutable

__all__ = [
    "AOTExecutable",
    "EagerExecutable",
    "Executable",
    "InductorExecutable",
    "NativeExecutable",
    "ProgramExecutable",
    "input_names",
]
