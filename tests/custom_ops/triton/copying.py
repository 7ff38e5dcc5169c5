"""A kernel that goes as far as it is told."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < count, other=0.0), mask=i < count)
