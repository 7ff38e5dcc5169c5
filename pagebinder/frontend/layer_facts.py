"""Do two modules hold the same, but for the values of their weights? All that a layer's code may read is compared.

classes, children, options     the same
weights                        of the same shapes, strides and dtypes
a number that counts layers    may differ as their places do: layer_idx, 4 and 7 in the layers 4 and 7
anything not understood        the same object, or the modules differ
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping

import torch

SMALL = 1024  # values of a tensor that is neither parameter nor buffer are compared up to here
# What torch keeps in every module; weights and children are compared by themselves.
_OF_TORCH = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_PLAIN = (str, bytes, float, complex, bool, types.NoneType, torch.dtype, torch.device, torch.Size, slice)


def layout(tensor: torch.Tensor) -> tuple:
    """All that a trace may depend on but values."""
    return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def values_of(tensor: torch.Tensor) -> bytes:
    """0.0 and -0.0 differ."""
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())


def same_facts(a: torch.nn.Module, b: torch.nn.Module, places: tuple[int, int]) -> bool:
    """Are two layers, at these places of a list, alike in all but the values of their weights?"""
    return _Comparison(a, b, places).modules(a, b)


class _Comparison:
    def __init__(self, a: torch.nn.Module, b: torch.nn.Module, places: tuple[int, int]) -> None:
        self.places = places
        self.paths = tuple({id(m): path for path, m in root.named_modules()} for root in (a, b))

    def modules(self, a: torch.nn.Module, b: torch.nn.Module) -> bool:
        if type(a) is not type(b) or a._modules.keys() != b._modules.keys():
            return False
        if a._non_persistent_buffers_set != b._non_persistent_buffers_set:
            return False
        for kept in ("_parameters", "_buffers"):
            x, y = getattr(a, kept), getattr(b, kept)
            if x.keys() != y.keys() or not all(_same_layout(x[name], y[name]) for name in x):
                return False
        x, y = ({k: v for k, v in m.__dict__.items() if k not in _OF_TORCH} for m in (a, b))
        children = zip(a._modules.values(), b._modules.values())
        return self.same(x, y) and all(self._same_child(x, y) for x, y in children)

    def _same_child(self, x: torch.nn.Module | None, y: torch.nn.Module | None) -> bool:
        return x is y or (x is not None and y is not None and self.modules(x, y))

    def same(self, x, y) -> bool:
        if x is y:
            return True
        if type(x) is not type(y):
            return False
        if isinstance(x, _PLAIN):
            return repr(x) == repr(y) if isinstance(x, float | complex) else x == y
        if isinstance(x, int):
            return x == y or x - self.places[0] == y - self.places[1]
        if isinstance(x, torch.Tensor):
            return _same_layout(x, y) and _same_values(x, y)
        if isinstance(x, torch.nn.Module):
            paths = self.paths[0].get(id(x)), self.paths[1].get(id(y))
            return paths[0] is not None and paths[0] == paths[1]
        if isinstance(x, Mapping):
            return list(x) == list(y) and all(self.same(x[k], y[k]) for k in x)
        if isinstance(x, list | tuple):
            return len(x) == len(y) and all(map(self.same, x, y))
        if isinstance(x, set | frozenset):
            return x == y
        if isinstance(x, types.MethodType):
            return x.__func__ is y.__func__ and self.same(x.__self__, y.__self__)
        if isinstance(x, functools.partial):
            return self.same((x.func, x.args, x.keywords), (y.func, y.args, y.keywords))
        return _same_by_itself(x, y)


def _same_layout(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return layout(x) == layout(y)


def _same_values(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.numel() <= SMALL and x.device.type != "meta" and values_of(x) == values_of(y)


def _same_by_itself(x, y) -> bool:
    """By a comparison that its class defines."""
    if type(x).__eq__ is object.__eq__:
        return False
    try:
        return bool(x == y)
    except Exception:
        return False
