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


def moved_to_device(x):
    if isinstance(x, (list, tuple)):
        return [moved_to_device(item) for item in x]
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


@dataclass(frozen=True)
class TritonOnDevice:
    """Takes and gives tensors of the CPU, so that tests of the other providers can use it as one of them."""

    name: str = "triton"

    def overload(self, op: str):
        provider = registered_providers()["triton"]
        provider.prepare(op)
        overload = provider.overload(op)

        def call(*operands, **options):
            moved = [moved_to_device(x) for x in operands]
            results = overload(*moved, **options)
            for argument, theirs, ours in zip(overload._schema.arguments, operands, moved):
                if argument.alias_info is not None and argument.alias_info.is_write and ours is not theirs:
                    theirs.copy_(ours)
            if isinstance(results, tuple):
                return tuple(x.cpu() for x in results)
            return None if results is None else results.cpu()

        return call
