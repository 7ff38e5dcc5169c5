"""The fused graph with its ops called from C++: nothing is compiled, and a call costs a few us instead of 10 to 25.

    embedding  mul(x, 2.0)  |  linears  view  qk_norm_rope_write  paged_attention  linear ...  |  index_select
    Python                     one native program                                                 Python

Runs of calls that a native program can make (native_text.py) become one call of it each. The ops and their operands
are those of the graph as it stands, so results are those of `eager`, to the bit.

A program that is run again on inputs that lie where they lay (each decode step of as many requests) is recorded: what
its ops told their kernels. From then on kernels are called alone (custom_ops/cpu/recording.h), a CUDA graph of a CPU.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pagebinder.custom_ops.cpu import build
from pagebinder.graph_tools import attach, attribute
from pagebinder.runtime.executables.eager import EagerExecutable
from pagebinder.runtime.executables.native_text import (
    NativeText,
    is_element,
    is_size,
    problem_of,
    write_program,
)

LEAST_CALLS = 4  # of a program; fewer are called from Python


class NativeExecutable(EagerExecutable):
    """Runs runs of ops from C++. `num_programs` of them make `num_native` of the graph's `num_calls` op calls."""

    name = "native"

    def __init__(self, gm: GraphModule) -> None:
        """Raises ProviderError where the C++ part cannot be built."""
        build.load()
        super().__init__(gm)
        self.num_calls = len(op_calls(gm.graph.nodes))
        runs = [run for run in native_runs(gm) if len(op_calls(run)) >= LEAST_CALLS]
        self.num_programs, self.num_native = len(runs), sum(len(op_calls(run)) for run in runs)
        self._with_programs = with_programs(gm, runs)

    def run_counts(self) -> RunCounts:
        """Of all programs together."""
        programs = [m for m in self._with_programs.modules() if isinstance(m, _ProgramCall)]
        return RunCounts(*(sum(numbers) for numbers in zip((0,) * 4, *(p.run_counts() for p in programs))))

    def _step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if _get_current_dispatch_mode() is not None:  # a capture, for example, wants to see the ops
            return super()._step(inputs)
        return self._with_programs(*(inputs[name] for name in self.input_names))


class RunCounts(NamedTuple):
    """How programs were run: `replayed` of the `runs`, from `recordings` that hold `recorded_bytes` of memory."""

    runs: int
    replayed: int
    recordings: int
    recorded_bytes: int


@contextlib.contextmanager
def record_runs(when: str) -> Iterator[None]:
    """Until it is left, runs of native programs in this process are recorded "never", "auto" (where it pays, as ever)
    or "always" (for tests). Raises ValueError for other words."""
    if when not in ("never", "auto", "always"):
        raise ValueError(f'runs are recorded "never", "auto" or "always", not "{when}"')
    build.load()
    before = torch.ops.pagebinder_cpu.record_runs(when)
    try:
        yield
    finally:
        torch.ops.pagebinder_cpu.record_runs(before)


class _ProgramCall(torch.nn.Module):
    """A native program of C++: tensors, then sizes -> list of tensors."""

    def __init__(self, program: NativeText, constants: Sequence[torch.Tensor]) -> None:
        super().__init__()
        ops = torch.ops.pagebinder_cpu
        self._number = ops.make_native_program(program.text, [c.detach() for c in constants])
        self._num_tensors = len(program.tensors)
        self._call, self._profiled = ops.run_native_program.default, ops.run_profiled_program.default
        weakref.finalize(self, ops.drop_native_program.default, self._number)

    def run_counts(self) -> RunCounts:
        return RunCounts(*torch.ops.pagebinder_cpu.native_program_counts(self._number))

    def forward(self, *operands: torch.Tensor | int) -> list[torch.Tensor]:
        call = self._profiled if torch.autograd._profiler_enabled() else self._call
        return call(self._number, operands[: self._num_tensors], operands[self._num_tensors :])


def native_runs(gm: GraphModule) -> list[list[Node]]:
    """Longest runs of neighbouring calls that a native program can make. Between them may stand weights and sizes,
    which do not depend on the run."""
    runs: list[dict[Node, None]] = [{}]
    for node in gm.graph.nodes:
        run = runs[-1]
        if node.op in ("placeholder", "get_attr") or (
            is_size(node) and run.keys().isdisjoint(node.all_input_nodes)
        ):
            continue
        is_element_of_it = is_element(node) and node.args[0] in run
        is_call = node.op == "call_function" and not is_size(node)
        if is_element_of_it or (is_call and problem_of(node) is None):
            run[node] = None
        elif run:
            runs.append({})
    return [list(run) for run in runs if run]


def with_programs(gm: GraphModule, runs: Sequence[Sequence[Node]]) -> GraphModule:
    """The graph with one call in place of each run. Sizes that stand within a run come before it."""
    root, graph = torch.nn.Module(), Graph()
    run_of = {node: run for run in runs for node in run}
    new: dict[Node, Node] = {}
    waiting: Sequence[Node] = ()  # the run that ends before the next other call
    for node in gm.graph.nodes:
        if node in run_of:
            waiting = run_of[node]
            continue
        if waiting and not (node.op == "get_attr" or is_size(node)):
            _call_program(gm, root, graph, waiting, new)
            waiting = ()
        if node.op == "get_attr":
            attach(root, node.target, attribute(gm, node.target))
        new[node] = graph.node_copy(node, new.__getitem__)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return GraphModule(root, graph, class_name="Native")


def _call_program(
    gm: GraphModule, root: torch.nn.Module, graph: Graph, run: Sequence[Node], new: dict[Node, Node]
) -> None:
    """Append the call that makes what later nodes read of a run, and name that in `new`."""
    inside = set(run)
    results = [n for n in run if _is_tensor(n) and not inside.issuperset(n.users)]
    program = write_program(run, results)
    name = f"program_{sum(isinstance(m, _ProgramCall) for m in root.children())}"
    root.add_module(name, _ProgramCall(program, [attribute(gm, n.target) for n in program.constants]))
    call = graph.call_module(name, tuple(new[n] for n in (*program.tensors, *program.sizes)))
    for place, node in enumerate(results):
        new[node] = graph.call_function(operator.getitem, (call, place))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def op_calls(nodes: Iterable[Node]) -> list[Node]:
    return [n for n in nodes if isinstance(n.target, torch._ops.OpOverload) and not is_size(n)]
