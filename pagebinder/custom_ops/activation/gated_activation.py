"""Gated activation: act(gate) * up, the middle of a SwiGLU or GeGLU MLP (Shazeer, 2020).

activation     act(x)
"silu"         x * sigmoid(x)                SwiGLU: Llama, Qwen, Mistral, Phi-3, GLM
"gelu"         x * Phi(x)
"gelu_tanh"    its tanh approximation        GeGLU: Gemma
"relu"         max(x, 0)                     ReGLU
"relu2"        max(x, 0) ** 2
"sigmoid"      1 / (1 + exp(-x))             GLU, output gates
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from pagebinder.custom_ops.library import define_op

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).pow(2),
    "sigmoid": torch.sigmoid,
}


def gated_activation_reference(gate, up, *, activation):
    """act(gate) * up, element by element, in gate's dtype: gate, up [..., C] of one shape and dtype.

    Raises:
        ValueError: unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation](gate) * up


def _gated_activation_fake(gate, up, *, activation):
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


GATED_ACTIVATION = define_op(
    "gated_activation",
    "(Tensor gate, Tensor up, *, str activation) -> Tensor",
    reference=gated_activation_reference,
    fake=_gated_activation_fake,
    transparent=True,
)
