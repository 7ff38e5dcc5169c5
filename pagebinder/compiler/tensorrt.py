"""`CompileConfig(executable="tensorrt")`: what `compile_model` asks of it. All of it is imported on demand."""

from __future__ import annotations

from torch.fx import GraphModule

from pagebinder.config import CompileConfig
from pagebinder.errors import ConfigError
from pagebinder.frontend.source import ModelSource
from pagebinder.report import CompileReport
from pagebinder.runtime.executables import Executable

NAME = "tensorrt"


def check_can_build(source: ModelSource, config: CompileConfig) -> None:
    """Raises ConfigError, before minutes of capturing, if engines are asked for and cannot be built here."""
    if config.executable == NAME and source.device.type != "meta":
        from pagebinder.runtime.executables import tensorrt_builder

        if (why := tensorrt_builder.problem(source.device)) is not None:
            raise ConfigError(f'executable="tensorrt": {why}.')


def tensorrt_executable(graph: GraphModule, config: CompileConfig, report: CompileReport) -> Executable:
    """Build the engines of a graph; what became of each partition goes to the report."""
    from pagebinder.runtime.executables import tensorrt, tensorrt_builder

    device = next(n.meta["val"].device for n in graph.graph.nodes if n.op == "placeholder")
    builder = tensorrt_builder.TensorRTBuilder(device)
    executable = tensorrt.TensorRTExecutable(graph, builder, fallback=config.tensorrt_fallback)
    report.notes += executable.describe()
    return executable


def note_partitions(graph: GraphModule, config: CompileConfig, report: CompileReport) -> None:
    """For `explain` without weights: how the graph would be cut."""
    if config.executable == NAME:
        from pagebinder.runtime.executables.partition import partition

        report.notes.append(f"tensorrt: {partition(graph).describe()}")
