"""The fused graph with its dense parts as TensorRT engines; paged and sparse attention stay in torch.

    partition.py      which calls go together
    Builder           a partition -> an engine, as bytes, and back: tensorrt_builder.py, or another one in tests
    EngineCache       <cache>/pagebinder/tensorrt/<key>.engine, with a digest

An engine's key covers all that it was made from: the calls, the weights' values, the sizes that it allows, and the
versions of TensorRT and of the GPU. A partition that cannot be built runs in torch, which the report says; so does a
step with more tokens than an engine allows.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

import pagebinder.custom_ops.cpu.build as cpu_build
from pagebinder.errors import ConfigError
from pagebinder.graph_tools import attribute
from pagebinder.runtime.executables.base import StepExecutable, input_names
from pagebinder.runtime.executables.partition import Partition, partition

logger = logging.getLogger("pagebinder")

Tensors = tuple[torch.Tensor, ...]
# An engine allows 1 to so many of whatever differs from step to step; the first is what it is tuned for.
TUNED_SIZE, LARGEST_SIZE = 64, 8192


class Builder(Protocol):
    """Makes engines. `environment`: versions and machine that an engine depends on, by name."""

    environment: Mapping[str, str]

    def build(self, partition: Partition) -> bytes:
        """The engine of a partition. Raises any exception where there is none."""
        ...

    def load(self, engine: bytes, partition: Partition) -> Callable[..., Tensors]:
        """The engine as a function of the partition's inputs. Raises any exception where it cannot be loaded."""
        ...


@dataclass(frozen=True)
class EngineFacts:
    """What became of a partition. `why_not`: why torch runs it; None where an engine does."""

    name: str
    num_calls: int
    key: str
    was_cached: bool
    why_not: str | None = None


class TensorRTExecutable(StepExecutable):
    """Builds engines on construction, or takes them from the cache.

    Args:
        folder: of the cache; None is the usual one. fallback: False makes it an error where torch would have to run a
            partition.
    Raises:
        ConfigError: a partition cannot be built, without `fallback`.
    """

    name = "tensorrt"

    def __init__(
        self, gm: GraphModule, builder: Builder, *, folder: Path | None = None, fallback: bool = True
    ) -> None:
        self.input_names = input_names(gm)
        self.partitioned = partition(gm)
        cache = EngineCache(folder or cpu_build.cache_root() / "tensorrt")
        self.engines = [self._engine(p, builder, cache, fallback) for p in self.partitioned.candidates]
        self.num_oversized_calls = 0

    def _step(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.partitioned.module(*(inputs[name] for name in self.input_names))

    def describe(self) -> list[str]:
        """Lines for the report: counts, and each partition that torch has to run."""
        built = [e for e in self.engines if e.why_not is None]
        lines = [f"tensorrt: {self.partitioned.describe()}"]
        cached = sum(e.was_cached for e in built)
        lines.append(f"tensorrt: {len(built)} of {len(self.engines)} engines run ({cached} from the cache)")
        lines += [
            f"tensorrt: {e.name} ({e.num_calls} calls) runs in torch: {e.why_not}"
            for e in self.engines
            if e.why_not
        ]
        return lines

    def _engine(self, part: Partition, builder: Builder, cache: EngineCache, fallback: bool) -> EngineFacts:
        key = engine_key(part, builder.environment)
        stored = cache.read(key)
        facts = EngineFacts(part.name, len(part.calls), key, stored is not None)
        try:
            if problem := inputs_problem(part):
                raise ConfigError(problem)
            engine = stored if stored is not None else builder.build(part)
            call = builder.load(engine, part)
            if stored is None:
                cache.write(key, engine)
        except Exception as error:  # a builder may fail in any way, and torch can run what it does not
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if not fallback:
                raise ConfigError(
                    f'executable="tensorrt": {part.name} ({len(part.calls)} calls) cannot be an engine ({why}); '
                    "tensorrt_fallback=True runs it in torch."
                ) from error
            logger.warning("tensorrt: %s runs in torch: %s", part.name, why)
            return EngineFacts(part.name, len(part.calls), key, False, why)
        setattr(self.partitioned.module, part.name, _Run(self, part, call))
        return facts


class _Run(torch.nn.Module):
    """A partition's engine, or its module for inputs that are larger than the engine allows."""

    def __init__(self, executable: TensorRTExecutable, part: Partition, call: Callable[..., Tensors]) -> None:
        super().__init__()
        self._count, self._call = executable, call
        object.__setattr__(self, "_module", part.module)
        results = next(n for n in part.module.graph.nodes if n.op == "output").args[0]
        self._is_single = isinstance(results, Node)
        self._dims = [
            (i, d)
            for i, node in enumerate(part.inputs)
            for d, size in enumerate(getattr(node.meta["val"], "shape", ()))
            if not isinstance(size, int)
        ]

    def forward(self, *inputs: torch.Tensor) -> Any:
        if any(not 1 <= inputs[i].shape[d] <= LARGEST_SIZE for i, d in self._dims):
            self._count.num_oversized_calls += 1
            return self._module(*inputs)
        results = self._call(*inputs)
        return results[0] if self._is_single and isinstance(results, (tuple, list)) else results


class EngineCache:
    """Engines as files. One that is damaged is built again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.engine"

    def read(self, key: str) -> bytes | None:
        try:
            data = self.path(key).read_bytes()
        except OSError:
            return None
        digest, engine = data[:32], data[32:]
        if hashlib.sha256(engine).digest() != digest:
            logger.warning("%s is damaged: building the engine again", self.path(key))
            return None
        return engine

    def write(self, key: str, engine: bytes) -> None:
        """Whole or not at all; an engine that cannot be kept is built again next time."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                file.write(hashlib.sha256(engine).digest() + engine)
            os.replace(file.name, self.path(key))
        except OSError as error:
            logger.warning("an engine cannot be kept in %s: %s", self.folder, error)


def inputs_problem(part: Partition) -> str | None:
    """Why a partition's inputs cannot be an engine's; None: they can."""
    numbers = [n.name for n in part.inputs if not isinstance(n.meta["val"], torch.Tensor)]
    return f"it takes numbers that are no size of its tensors: {', '.join(numbers)}" if numbers else None


def engine_key(part: Partition, environment: Mapping[str, str]) -> str:
    """A digest of all that an engine is made from. Names of values and of symbols do not matter."""
    lines = [f"{name}={value}" for name, value in sorted(environment.items())]
    lines.append(f"sizes 1 {TUNED_SIZE} {LARGEST_SIZE}")
    numbers: dict[Node, int] = {}
    symbols: dict[str, str] = {}
    for node in part.module.graph.nodes:
        numbers[node] = len(numbers)
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        if node.op == "get_attr":
            target = _tensor_digest(attribute(part.module, node.target))
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _Number(numbers[n]))
        lines.append(f"{node.op} {target} {arguments} {_value(node.meta.get('val'), symbols)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]


class _Number(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"


def _value(value: Any, symbols: dict[str, str]) -> str:
    """A value's dtype and sizes, with symbols numbered as they come."""
    if isinstance(value, torch.Tensor):
        sizes = [_size(s, symbols) for s in (*value.shape, *value.stride())]
        return f"{value.dtype} {value.device.type} {sizes}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return str([_value(v, symbols) for v in value])
    return _size(value, symbols)


def _size(size: Any, symbols: dict[str, str]) -> str:
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(size)
    expression = size.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        symbols.setdefault(str(symbol), f"d{len(symbols)}")
    renamed = {s: type(s)(symbols[str(s)], **s.assumptions0) for s in expression.free_symbols}
    return str(expression.xreplace(renamed))


def _tensor_digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tuple(tensor.shape)} {hashlib.sha256(data.numpy()).hexdigest()}"
