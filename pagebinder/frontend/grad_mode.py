"""`torch.no_grad()` within a model leaves no trace where nothing records gradients anyway.

torch.export notes every change of the grad mode as a node, splits the graph at each and joins the parts again: a
tenth of a compilation, for a graph without these nodes. Models write it around their RoPE tables.
"""

from __future__ import annotations

import functools

import torch
from torch.overrides import TorchFunctionMode


def same_grad_mode_untraced(forward):
    """Decorates the forward of a module that is traced; a real change of the grad mode is traced as ever."""

    @functools.wraps(forward)
    def traced(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return forward(*args, **kwargs)
        with _SameGradModeUntraced():
            return forward(*args, **kwargs)

    return traced


class _SameGradModeUntraced(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch._C._set_grad_enabled and args[0] == torch.is_grad_enabled():
            return None
        return func(*args, **(kwargs or {}))
