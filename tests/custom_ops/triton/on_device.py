"""Runs ops of the triton provider where its kernels run: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagebinder.custom_ops.providers import registered_providers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of `opcheck`: what a provider's kernel can get wrong; tracing sees only the schema and the fake kernel of the op.
OF_A_KERNEL = ("test_schema", "test_faketensor")


@functools.cache
def quicken_interpreter() -> None:
    """Has Triton's interpreter do once what it does at every operation, and leave out what nobody looks at.

    It replaces the language's functions by its own at each call of a device function (`tl.sum` is one), and looks for
    overflows that are told only in debug mode. Without its insides as they are known here, tests are slower, and the
    same.
    """
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = _once_a_kernel(interpreter._patch_lang)
    builder = getattr(interpreter, "interpreter_builder", None)
    if getattr(getattr(builder, "options", None), "sanitize_overflow", False):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    _remember_shapes()


def _by_name(numpy_dtype: Callable) -> Callable:
    known: dict[str, object] = {}

    def numpy_dtype_by_name(dtype):
        if (name := (dtype.element_ty if dtype.is_block() else dtype).name) not in known:
            known[name] = numpy_dtype(dtype)
        return known[name]

    return numpy_dtype_by_name


def _remember_shapes() -> None:
    """Every value has a type with a shape, which is made anew, number by number, at each operation: a third of the
    time. A type, or a tensor, of a shape that was there before gets what was made of it then; nobody changes it."""
    from triton.language import core

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_types: dict[tuple, tuple] = {}
    of_tensors: dict[tuple, tuple] = {}

    def block_type(self, element_ty, shape):
        if (key := tuple(shape)) not in of_types:
            make_type(self, element_ty, shape)
            of_types[key] = self.shape, self.numel
        self.element_ty, (self.shape, self.numel) = element_ty, of_types[key]
        self.name = f"<{key}, {element_ty}>"

    def tensor(self, handle, type):
        if (key := tuple(type.shape) if type.is_block() else ()) not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[key]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _once_a_kernel(patch: Callable) -> Callable:
    """`patch(function)` replaces functions of the language that `function` sees, until its result restores them. What
    a kernel has replaced is not replaced again by the device functions that it calls.
    """
    import triton.language as tl

    prepared = set()

    class NothingToRestore:
        def restore(self) -> None:
            pass

    def patch_once(function):
        languages = {m for m in function.__globals__.values() if m is tl or m is tl.core}
        if languages <= prepared:
            return NothingToRestore()
        scope = patch(function)
        prepared.update(languages)
        restore = getattr(scope, "restore", lambda: None)

        def restore_and_forget() -> None:
            restore()
            prepared.clear()

        if hasattr(scope, "restore"):
            scope.restore = restore_and_forget
        return scope

    return patch_once


class Moved:
    """Operands of a call on the device, with their whole storages: views keep their strides, share what they shared,
    and what lies between their rows is there, too."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.Tensor] = {}

    def __call__(self, x):
        if isinstance(x, (list, tuple)):
            return [self(item) for item in x]
        if not isinstance(x, torch.Tensor) or x.device.type == DEVICE:
            return x
        if not x.numel():
            return x.to(DEVICE)
        key = x.untyped_storage().data_ptr()
        if key not in self._storages:
            self._storages[key] = storage_bytes(x).to(DEVICE)
        whole = self._storages[key]
        elements = whole[: len(whole) // x.itemsize * x.itemsize].view(x.dtype)
        return elements.as_strided(x.shape, x.stride(), x.storage_offset())


def storage_bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def moved_to_device(x):
    return Moved()(x)


@dataclass(frozen=True)
class TritonOnDevice:
    """Takes and gives tensors of the CPU, so that tests of the other providers can use it as one of them."""

    name: str = "triton"

    def overload(self, op: str):
        provider = registered_providers()["triton"]
        provider.prepare(op)
        overload = provider.overload(op)

        def call(*operands, **options):
            to_device = Moved()
            moved = [to_device(x) for x in operands]
            results = overload(*moved, **{name: to_device(x) for name, x in options.items()})
            for argument, theirs, ours in zip(overload._schema.arguments, operands, moved):
                if argument.alias_info is not None and argument.alias_info.is_write and ours is not theirs:
                    storage_bytes(theirs).copy_(storage_bytes(ours))
            if isinstance(results, (tuple, list)):
                return type(results)(x.cpu() for x in results)
            return None if results is None else results.cpu()

        return call
