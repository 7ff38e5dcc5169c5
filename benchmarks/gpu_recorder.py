"""Notes what launches of Triton kernels would be compiled for on a Hopper, on a CPU: what `gpu_ahead.py` compiles.

A plugin of pytest (`-p gpu_recorder`): the functions that serve ops run twice, once as they would launch on the GPU,
which is only noted, and once in the interpreter. With RECORD_ONLY=1 nothing is computed. Lines of JSON go to
$RECORD_FILE.<process>: [module, kernel, operands, options of the launch]
"""

from __future__ import annotations

import inspect
import json
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from pagebinder.custom_ops.triton import gpu, provider

FILE = f"{os.environ['RECORD_FILE']}.{os.getpid()}"
RECORD_ONLY = os.environ.get("RECORD_ONLY") == "1"
MULTIPLE, OTHER, WIDE = 16, 3, 1 << 40  # stand for integers that a kernel tells apart
_seen: set[str] = set()
_is_dry = [RECORD_ONLY]
_run = InterpretedFunction.run


def described(value, parameter: inspect.Parameter, is_specialised: bool) -> list:
    """What a compiled kernel knows of an operand."""
    if isinstance(value, TensorDescriptor):
        return ["descriptor", str(value.base.dtype).removeprefix("torch."), list(value.block_shape)]
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), value.data_ptr() % 16 == 0]
    if value is None or "constexpr" in str(parameter.annotation) or isinstance(value, bool):
        return ["value", value]
    if isinstance(value, float):
        return ["value", 0.5]
    wide = WIDE if not -(2**31) <= value < 2**31 else 0
    if is_specialised and value == 1:
        return ["value", 1]
    return ["value", wide + (MULTIPLE if is_specialised and value % 16 == 0 else OTHER)]


def note(kernel: InterpretedFunction, operands, options) -> None:
    parameters = inspect.signature(kernel.fn).parameters
    values = dict(zip(parameters, operands)) | options
    plain = kernel.kwargs.get("do_not_specialize") or ()
    known = {n: described(values[n], p, n not in plain) for n, p in parameters.items() if n in values}
    others = {n: v for n, v in options.items() if n not in parameters}
    line = json.dumps([kernel.fn.__module__, kernel.fn.__name__, known, others])
    if line not in _seen:
        _seen.add(line)
        with open(FILE, "a") as file:
            file.write(line + "\n")


def run(self, *operands, grid, warmup, **options):
    if _is_dry[0]:
        return note(self, operands, options)
    return _run(self, *operands, grid=grid, warmup=warmup, **options)


def twice(function):
    once = _on_its_device(function)

    def call(*operands, **options):
        before = gpu.MULTIPROCESSORS_OF_NO_GPU, gpu.CAPABILITY_OF_NO_GPU
        gpu.MULTIPROCESSORS_OF_NO_GPU, gpu.CAPABILITY_OF_NO_GPU = gpu.HOPPERS_MULTIPROCESSORS, gpu.HOPPER
        _is_dry[0], result = True, None
        try:
            result = once(*operands, **options)
        except Exception:
            if RECORD_ONLY:
                raise  # else the second run tells
        finally:
            _is_dry[0] = RECORD_ONLY
            gpu.MULTIPROCESSORS_OF_NO_GPU, gpu.CAPABILITY_OF_NO_GPU = before
        return result if RECORD_ONLY else once(*operands, **options)

    return call


InterpretedFunction.run = run
_on_its_device, provider.on_its_device = provider.on_its_device, twice
