"""`pagebinder::pointwise`: operations on one element at a time, many in one call.

    h = x0 + x1;  y = tanh(h / 30) * 30        ->        one pass over x0 and x1, h and y written once

Torch's ops one by one cost a call and a trip through memory each; a compiler that writes a loop for them takes
seconds for each model. A kernel that reads the program (program.py) a block of elements at a time needs neither: what
lies between two operations stays in the first-level cache.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.pointwise.program import read_program


def pointwise_reference(inputs, program):
    """Run a program on tensors that broadcast against each other.

    Args:
        inputs: x0, x1, ... of float32, bfloat16, float16 or bool.
        program: see `program.py`.
    Returns:
        A contiguous tensor for each result of the program, of the inputs' broadcast shape.
    Raises:
        ValueError: the program cannot be read.
    """
    shape = torch.broadcast_shapes(*(x.shape for x in inputs))
    return [y.expand(shape).contiguous() for y in read_program(program).run(inputs)]


def _pointwise_fake(inputs, program):
    shape = torch.broadcast_shapes(*(x.shape for x in inputs))
    return [inputs[0].new_empty(shape, dtype=dtype) for dtype in read_program(program).dtypes()]


POINTWISE = define_op(
    "pointwise",
    "(Tensor[] inputs, str program) -> Tensor[]",
    reference=pointwise_reference,
    fake=_pointwise_fake,
    transparent=True,
)
