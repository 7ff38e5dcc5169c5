"""Engines by Torch-TensorRT, which is imported when one is asked for.

This file has not been run yet: Torch-TensorRT's libraries come from NVIDIA's index and need a GPU. It follows the
documentation of torch_tensorrt.dynamo; `tests/test_tensorrt.py` runs it where torch_tensorrt can be imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import metadata

import torch

from pagebinder.errors import ConfigError
from pagebinder.runtime.executables.partition import Partition
from pagebinder.runtime.executables.tensorrt import LARGEST_SIZE, TUNED_SIZE, Tensors

# What an engine is made with beside the graph; torch's own lowering is part of it.
PACKAGES = ("torch", "torch_tensorrt", "tensorrt", "pagebinder")


def problem(device: torch.device) -> str | None:
    """Why engines cannot be built for a device; None: they can. Nothing is imported."""
    if importlib.util.find_spec("torch_tensorrt") is None:
        return (
            "torch_tensorrt is not installed: pip install 'pagebinder[tensorrt]' --extra-index-url "
            "https://pypi.nvidia.com, on a machine with an NVIDIA GPU"
        )
    if device.type != "cuda":
        return f'TensorRT runs on an NVIDIA GPU, and the model is on {device}: device="cuda" moves a checkpoint there'
    return None


class TensorRTBuilder:
    """Raises ConfigError where it cannot work."""

    def __init__(self, device: torch.device) -> None:
        if (why := problem(device)) is not None:
            raise ConfigError(f'executable="tensorrt": {why}.')
        import torch_tensorrt

        self._torch_tensorrt = torch_tensorrt
        self._device = device
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        self.environment = {name: _version(name) for name in PACKAGES} | {
            "gpu": torch.cuda.get_device_name(device),
            "capability": capability,
        }

    def build(self, partition: Partition) -> bytes:
        """Serialise the partition's engine; every call has to be in it."""
        exported = _exported(partition, self._device)
        inputs = [self._input(node.meta["val"]) for node in partition.inputs]
        convert = self._torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
        return bytes(convert(exported, arg_inputs=inputs, require_full_compilation=True))

    def load(self, engine: bytes, partition: Partition) -> Callable[..., Tensors]:
        results = next(n for n in partition.module.graph.nodes if n.op == "output").args[0]
        num_outputs = len(results) if isinstance(results, (tuple, list)) else 1
        return self._torch_tensorrt.runtime.TorchTensorRTModule(
            serialized_engine=engine,
            name=partition.name,
            input_binding_names=[node.name for node in partition.inputs],
            output_binding_names=[f"output{i}" for i in range(num_outputs)],
        )

    def _input(self, value: torch.Tensor):
        """The sizes that an input may have."""
        fixed = [None if isinstance(size, torch.SymInt) else int(size) for size in value.shape]
        shapes = [
            tuple(size if other is None else other for other in fixed)
            for size in (1, TUNED_SIZE, LARGEST_SIZE)
        ]
        if None not in fixed:
            return self._torch_tensorrt.Input(shape=tuple(fixed), dtype=value.dtype)
        return self._torch_tensorrt.Input(
            min_shape=shapes[0], opt_shape=shapes[1], max_shape=shapes[2], dtype=value.dtype
        )


def _exported(partition: Partition, device: torch.device) -> torch.export.ExportedProgram:
    """The partition in torch's own ops, exported with the sizes that differ as dynamic ones."""
    dims: dict[str, torch.export.Dim] = {}
    examples, dynamic = [], []
    for node in partition.inputs:
        value, of_input = node.meta["val"], {}
        for d, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                symbol = str(size.node.expr)
                dims.setdefault(symbol, torch.export.Dim(f"size{len(dims)}", min=1, max=LARGEST_SIZE))
                of_input[d] = dims[symbol]
        shape = [TUNED_SIZE if isinstance(size, torch.SymInt) else int(size) for size in value.shape]
        examples.append(torch.zeros(shape, dtype=value.dtype, device=device))
        dynamic.append(of_input)
    with torch.no_grad():
        return torch.export.export(partition.lowered(), tuple(examples), dynamic_shapes=tuple(dynamic))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
