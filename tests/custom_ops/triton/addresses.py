"""Has Triton's interpreter check that every address that a kernel reads or writes lies in a tensor of its launch."""

from __future__ import annotations

import functools

import numpy as np
import torch


class Spans:
    """[begin, end) of the storages of a launch's tensors, in order."""

    def __init__(self, operands) -> None:
        storages = [x.untyped_storage() for x in operands if isinstance(x, torch.Tensor)]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})
        self._begins, self._ends = (np.array(ends, np.uint64) for ends in zip(*spans)) if spans else ([], [])

    def check(self, pointers, mask, what: str) -> None:
        """Raises IndexError."""
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(
            np.uint64
        )
        if not len(addresses):
            return
        num_bytes = np.uint64(max(1, pointers.dtype.element_ty.primitive_bitwidth // 8))
        at = np.searchsorted(self._begins, addresses, side="right") - 1
        outside = (
            at < 0
            if not len(self._ends)
            else (at < 0) | (addresses + num_bytes > self._ends[np.maximum(at, 0)])
        )
        if outside.any():
            raise IndexError(
                f"{outside.sum()} of {len(addresses)} addresses of a {what} lie in no tensor of the launch"
            )


@functools.cache
def check_addresses() -> None:
    """From here on, in this process. Where the interpreter's insides are others than those known here, nothing is."""
    from triton.runtime import interpreter

    executor, builder = (getattr(interpreter, name, None) for name in ("GridExecutor", "InterpreterBuilder"))
    if not all(hasattr(builder, name) for name in ("create_masked_load", "create_masked_store")):
        return
    launched: list[Spans] = []
    launch, load, store = executor.__call__, builder.create_masked_load, builder.create_masked_store

    def checked_launch(self, *operands, **options):
        launched.append(Spans((*operands, *options.values())))
        try:
            return launch(self, *operands, **options)
        finally:
            launched.pop()

    def checked_load(self, pointers, mask, *others, **options):
        launched[-1].check(pointers, mask, "load")
        return load(self, pointers, mask, *others, **options)

    def checked_store(self, pointers, value, mask, *others, **options):
        launched[-1].check(pointers, mask, "store")
        return store(self, pointers, value, mask, *others, **options)

    executor.__call__, builder.create_masked_load, builder.create_masked_store = (
        checked_launch, checked_load, checked_store
    )  # fmt: skip
