"""`pagebinder_triton::gated_activation`: act(gate) * up in one pass; both are rounded as in the reference.

grid [rows, column tiles]: gate and up may be halves of one wider tensor
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagebinder.custom_ops.activation.gated_activation import ACTIVATIONS
from pagebinder.custom_ops.triton.rms_norm import rows_of
from pagebinder.custom_ops.triton.values import rounded, tanh, through

MAX_BLOCK = 2048


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu2":
        y = tl.where(x < 0, 0.0, x) * tl.where(x < 0, 0.0, x)
    else:
        y = 1 / (1 + tl.exp(-x))
    return y


@triton.jit
def gated_activation_kernel(
    gate_ptr, up_ptr, out_ptr, stride_gate, stride_up, C, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < C
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=mask, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + column, mask=mask, other=0).to(tl.float32)
    y = through(activated(gate, ACTIVATION), dtype) * up
    tl.store(out_ptr + row * C + column, rounded(y, dtype), mask=mask)


def gated_activation(gate, up, *, activation):
    """See `gated_activation_reference`."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; one of {', '.join(ACTIVATIONS)}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError("gate and up must have one shape and dtype")
    return gate_into(torch.empty(gate.shape, dtype=gate.dtype, device=gate.device), gate, up, activation)


def gate_into(out, gate, up, activation) -> torch.Tensor:
    """`out`: contiguous; it may be `gate` or `up`, as each value is read by the thread that writes it."""
    if gate.numel() == 0:
        return out
    gates, ups = rows_of(gate), rows_of(up)
    block = min(MAX_BLOCK, triton.next_power_of_2(gates.shape[1]))
    gated_activation_kernel[len(gates), triton.cdiv(gates.shape[1], block)](
        gates, ups, out, gates.stride(0), ups.stride(0), gates.shape[1], BLOCK=block, ACTIVATION=activation
    )
    return out
