"""Where Triton's interpreter differs from its compiler so that kernels would have to be written for it."""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def keep_masks_boolean() -> None:
    """A comparison of scalars that is spread over a tile stays one of bits.

    The interpreter gives it the type of the numbers that were compared. As a mask, Triton 3.9 refuses that
    (`mask has unsupported dtype`); earlier releases take it. Where the interpreter's insides are others than those
    known here, nothing is changed.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = getattr(interpreter, "InterpreterBuilder", None)
    spread = getattr(builder, "create_splat", None)
    if spread is None:
        return

    def create_splat(self, ret_ty, arg):
        tile = spread(self, ret_ty, arg)
        if np.asarray(arg.data).dtype.kind != "b":
            return tile
        return interpreter.TensorHandle(tile.data.astype(bool), tl.int1)

    builder.create_splat = create_splat
