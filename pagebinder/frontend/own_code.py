"""Whose code does a model run? That of torch, transformers and ours is compared as tiny models before each release.

Anything else, a hook, a function in an attribute, a function of transformers' that was replaced, may do what nobody
sees: it is run beside its graph (compiler/probe.py), is not copied from layer to layer, and attention that it has
a hand in is traced instead of taken for transformers'.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules import module as torch_module

KNOWN = frozenset({"pagebinder", "torch", "transformers"})  # packages
# What files of transformers import besides.
IMPORTED = frozenset({*sys.stdlib_module_names, "accelerate", "einops", "huggingface_hub", "kernels", "numpy",
                       "packaging", "safetensors"})  # fmt: skip
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
FUNCTIONAL = "torch.nn.functional"
# What attention is made of, as people replace it for all models at once.
OF_ATTENTION = {
    FUNCTIONAL: ("scaled_dot_product_attention", "softmax", "dropout"),
    "torch": ("matmul", "bmm", "baddbmm", "softmax", "einsum"),
}


def is_known(module: torch.nn.Module) -> bool:
    """Is all of a module's code that of transformers or torch, or of a leaf of ours?"""
    functions = [f for name in GLOBAL_HOOKS for f in getattr(torch_module, name, {}).values()]
    files = {FUNCTIONAL}
    for part in module.modules():
        files.add(type(part).__module__)
        functions += [type(part), part.forward, *functions_of(part)]
    return all(map(_is_of_known, functions)) and not any(replaced_in(files))


def functions_of(module: torch.nn.Module) -> list[Any]:
    """What a module holds that can be called and is no module: its hooks, functions and objects in its attributes."""
    hooks = [f for name in HOOKS for f in getattr(module, name, {}).values()]
    return hooks + [value for value in vars(module).values() if _is_code(value)]


def replaced_in(files: Iterable[str]) -> Iterator[Any]:
    """Functions in modules of these names, as far as they are of torch or transformers, that come from elsewhere."""
    for file in files:
        if file.split(".")[0] in KNOWN:
            yield from _of_others(vars(sys.modules.get(file, object)))


def attention_is_replaced() -> bool:
    """Has somebody put another function in the place of one of torch's that attention is computed by?"""
    functions = (vars(sys.modules[file]).get(n) for file, names in OF_ATTENTION.items() for n in names)
    return not all(_is_of_known(f) for f in functions if f is not None)


def comes_from(code: Any) -> set[str]:
    """The packages that a function's code is from: its own, those of what it wraps; of an object, its class's."""
    found = set()
    while code is not None:
        while isinstance(code, functools.partial | types.MethodType):
            code = code.func if isinstance(code, functools.partial) else code.__func__
        if isinstance(code, types.FunctionType):  # functools.wraps makes __module__ that of what is wrapped
            found.add(code.__globals__.get("__name__") or "")
        else:
            owner = code if isinstance(getattr(code, "__module__", None), str) else type(code)
            found.add(str(owner.__module__))
        code = getattr(code, "__wrapped__", None)
    return {name.split(".")[0] for name in found}


def _is_code(value: Any) -> bool:
    return callable(value) and not isinstance(value, torch.nn.Module | torch.Tensor)


def _is_of_known(code: Any) -> bool:
    return comes_from(code) <= KNOWN | {"builtins"}


def _of_others(names: Mapping[str, Any]) -> Iterator[Any]:
    for value in list(names.values()):
        if isinstance(value, types.FunctionType) and not comes_from(value) <= KNOWN | IMPORTED:
            yield value
