"""`CompileConfig(executable=...)`: what runs a fused graph, and why."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from pagebinder.compiler.streams import eager_executable, inductor_executable
from pagebinder.compiler.tensorrt import tensorrt_executable
from pagebinder.config import CompileConfig
from pagebinder.custom_ops.cpu import build as cpu_build
from pagebinder.custom_ops.cpu import compiler
from pagebinder.custom_ops.library import NAMESPACE, op_info, overload
from pagebinder.errors import CompilerNotFoundError, ConfigError
from pagebinder.frontend.source import ModelSource
from pagebinder.graph_tools import CASTS, TORCHS, is_view_op, module_path
from pagebinder.passes.layer_blocks import place_of
from pagebinder.passes.op_costs import scenario
from pagebinder.passes.op_costs_ours import cost_model
from pagebinder.passes.select_providers import ALWAYS_ON_CPU, LOOPS_ON_CPU
from pagebinder.report import CompileReport
from pagebinder.runtime.executables import Executable, NativeExecutable
from pagebinder.runtime.executables.native import op_calls
from pagebinder.runtime.executables.torch_share import PRODUCTS, leaves_little_to_torch

aten = torch.ops.aten
# Of torch, without sums over a row: few and small ones take as long one by one as fused (docs/measurements.md).
LIGHT = (
    *CASTS, aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.neg.default, aten.exp.default,
    aten.sigmoid.default, aten.silu.default, aten.softplus.default, aten.clone.default, aten._unsafe_view.default,
    aten.cos.default, aten.sin.default, aten.cat.default, aten.stack.default, aten.repeat.default,
    aten.repeat_interleave.self_int,
    torch.ops.pagebinder.gated_activation.default,
)  # fmt: skip
MOST_SHARE = 2e-3  # see share_of_light_loops


def check_executable(source: ModelSource, config: CompileConfig) -> None:
    """Refuse what cannot run here before anything is traced. Raises ConfigError, CompilerNotFoundError."""
    if config.executable == "native" and source.device.type == "cuda":
        raise ConfigError(
            'executable="native" is for a CPU; on a GPU captured graphs do what it is for: use "auto".'
        )
    needs = {"native": cpu_build.problem, "inductor": compiler.problem}
    if config.executable in needs and (problem := needs[config.executable]()) is not None:
        instead = "eager" if config.executable == "native" or needs["native"]() is not None else "native"
        raise CompilerNotFoundError(
            f'executable="{config.executable}" needs a C++ compiler: {problem}. Or use "{instead}".'
        )


def is_compiled(config: CompileConfig) -> bool:
    """Will a compiler fuse ops of torch, where there is a choice? False: each of them is a launch."""
    if config.executable in ("auto", "cuda_graph"):
        return config.streams != "on" and cpu_build.problem() is None and compiler.problem() is None
    return config.executable != "eager"


def executable_of(graph: GraphModule, config: CompileConfig, report: CompileReport) -> Executable:
    """Build what `config.executable` asks for; "auto" is native or inductor where there are kernels of ours."""
    executable = _executable_of(graph, config, report)
    executable.limits_torch = leaves_little_to_torch(graph)
    return executable


def _executable_of(graph: GraphModule, config: CompileConfig, report: CompileReport) -> Executable:
    wanted, why = config.executable, "requested"
    if wanted in ("auto", "cuda_graph"):
        is_cpu = report.device == "cpu"
        loops = loops_of_layers(graph) if is_cpu else []
        no_kernels, problem = cpu_build.problem(), compiler.problem()
        graphs = "captured as CUDA graphs, of " if wanted == "cuda_graph" else ""
        if no_kernels is not None or (problem is not None and not is_cpu):
            wanted, why = "eager", f"nothing else can be used: {no_kernels or problem}"
        elif is_cpu and not loops:
            wanted, why = "native", "the layers are ops of ours: nothing is left to fuse"
        elif is_cpu and (share := share_of_light_loops(graph)) is not None and share <= MOST_SHARE:
            wanted = "native"
            why = f"what layers compute by ops of torch moves {share:.2%} of their weights' bytes: {', '.join(loops)}"
        elif problem is not None:
            wanted, why = "native", f"kernels are here, but nothing that fuses {', '.join(loops)}: {problem}"
        else:
            wanted, why = "inductor", "a C++ compiler is here"
            if is_cpu:
                why = f"it fuses what layers compute by ops of torch: {', '.join(loops)}"
        if config.streams == "on":
            wanted, why = "eager", 'streams="on" needs ops that run one by one'
        why = graphs + why
    report.executable, report.executable_why = wanted, why
    if wanted == "tensorrt":
        return tensorrt_executable(graph, config, report)
    if wanted == "native":
        executable = NativeExecutable(graph)
        report.executable_why += (
            f"; {executable.num_native} of {executable.num_calls} calls are made from C++"
        )
        return executable
    make = inductor_executable if wanted == "inductor" else eager_executable
    return make(graph, config, report)


def has_loops(gm: GraphModule) -> bool:
    """Before providers are chosen: do layers compute by ops of torch what a kernel or a compiler could fuse? For the
    few around them (tables of angles, say) no kernel is fetched."""
    norms = {str(overload(NAMESPACE, name)) for name in ALWAYS_ON_CPU}
    return not norms.issuperset(loops_of_layers(gm))


def loops_are_ours(gm: GraphModule, config: CompileConfig) -> bool:
    """Before providers are chosen, on a CPU: do kernels of ours run the loops of layers? Not where inductor does: it
    is asked for, or `executable="auto"` comes to it, as there is more than our kernels can do."""
    if config.executable in ("native", "eager"):
        return True
    if config.executable != "auto" or cpu_build.problem() is not None:
        return False
    if config.streams == "on" or compiler.problem() is not None:
        return True
    share = share_of_light_loops(gm, by_ours=(*ALWAYS_ON_CPU, *LOOPS_ON_CPU))
    return share is not None and share <= MOST_SHARE


def loops_of_layers(gm: GraphModule) -> list[str]:
    """What layers compute by ops of torch, by name, and by ours that dissolve into such: what inductor could fuse.
    Views, sizes, products and a selection of rows (passes/narrow_rows.py) are no loops."""
    return sorted({str(n.target) for n in _ops_of_layers(gm) if _is_loop(n.target)})


def share_of_light_loops(gm: GraphModule, by_ours: Iterable[str] = ()) -> float | None:
    """Bytes that loops of layers move for one token over those that the layers' weights stand for: codes must not
    choose another executable, which would round otherwise. None: some loops are not light.

    `by_ours`: names of ops of ours that are no loops, as they will get kernels.
    """
    ours = {overload(NAMESPACE, name) for name in by_ours}
    ops = _ops_of_layers(gm)
    loops = [n for n in ops if _is_loop(n.target) and n.target not in ours]
    if not all(n.target in LIGHT for n in loops):
        return None
    if not loops:
        return 0.0
    model, step = cost_model(gm, decoded=True), scenario(tokens=1, context=1)
    costs = {n: model.cost(n) for n in ops}
    moved = sum(float(costs[n].activation_bytes.subs(step)) for n in loops)
    weights = sum(float(cost.weight_bytes.subs(step)) for cost in costs.values())
    return moved / weights if weights else None


def _ops_of_layers(gm: GraphModule) -> list[Node]:
    return [n for n in op_calls(gm.graph.nodes) if place_of(module_path(n)).index is not None]


def _is_loop(op: torch._ops.OpOverload) -> bool:
    if op.namespace not in TORCHS:  # of others: inductor fuses nothing with a kernel that it did not write
        return op.namespace == NAMESPACE and op_info(op._opname).transparent
    return op in CASTS or not (is_view_op(op) or op in (*PRODUCTS, aten.index_select.default))
