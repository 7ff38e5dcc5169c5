"""Models in another dtype, as transformers loads a checkpoint in that dtype: RoPE frequencies are not rounded, nor is
what a family keeps in float32, as routers of many mixtures are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Set

import torch

from pagebinder.frontend.wrappers import is_transformers

Owned = tuple[torch.nn.Module, str, torch.Tensor]


def is_in(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Would `convert` change nothing? Only parameters are looked at."""
    floats = [p for p in module.parameters() if p.is_floating_point()]
    if all(p.dtype is dtype for p in floats):
        return True  # as its user made it
    made = _made_in_float32(module, dtype)
    wide = {id(tensor) for _, _, tensor in _in_float32(module, dtype, made)}
    return all(p.dtype is (torch.float32 if id(p) in wide else dtype) for p in floats)


def convert(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """`module.to(dtype)` in place, but for what transformers would not round."""
    made = _made_in_float32(module, dtype)
    wide = [(owner, name, tensor.data.float()) for owner, name, tensor in _in_float32(module, dtype, made)]
    buffers = {}
    if is_transformers(module):
        for owner in module.modules():
            buffers |= {(owner, name): owner._buffers[name] for name in owner._non_persistent_buffers_set}
    module.to(dtype)
    for (owner, name), buffer in buffers.items():
        owner._buffers[name] = buffer
    for owner, name, values in wide:
        getattr(owner, name).data = values
    return module


def hint_on_float16(module: torch.nn.Module) -> str:
    """What to try where a model in float16 is refused: T5 and BART look for overflows among all tokens then."""
    if all(p.dtype is not torch.float16 for p in module.parameters()):
        return ""
    return (
        "  Its weights are in float16, in which some models look for overflows among all tokens of a batch; in "
        'bfloat16 and float32 they do not: CompileConfig(dtype="bfloat16").'
    )


def widen_kept(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """What a checkpoint that is loaded in `dtype` has in float32, of a model that was built in `dtype`: what its
    family makes in float32 is so already."""
    for owner, name, tensor in list(_in_float32(module, dtype)):
        getattr(owner, name).data = tensor.data.float()


def _in_float32(module: torch.nn.Module, dtype: torch.dtype, made: Set[str] = frozenset()) -> Iterator[Owned]:
    """(module, name, tensor) of parameters and buffers that transformers keeps in float32, and of those in `made`."""
    if not is_transformers(module):
        return
    names: list[str] = []
    if dtype is torch.float16:
        names += getattr(module, "_keep_in_fp32_modules", None) or ()
    if dtype in (torch.float16, torch.bfloat16):
        names += getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    if not names and not made:
        return
    pattern = re.compile("|".join(name.replace("*", ".*") for name in names) or "$^")
    for path, owner in module.named_modules():
        tensors = owner._parameters | {
            name: buffer
            for name, buffer in owner._buffers.items()
            if name not in owner._non_persistent_buffers_set
        }
        for name, tensor in tensors.items():
            if tensor is None or not tensor.is_floating_point():
                continue
            full = f"{path}.{name}" if path else name
            if full in made or pattern.search(full):
                yield owner, name, tensor


def _made_in_float32(module: torch.nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of what the family's own code makes in float32 where a model is built in `dtype`."""
    if dtype is torch.float32:
        return set()
    try:
        with torch.device("meta"):
            built = type(module)._from_config(copy.deepcopy(module.config), dtype=dtype)
    except Exception:  # parts that a user put together, whose classes say nothing of it
        return set()
    tensors = (*built.named_parameters(), *built.named_buffers())
    return {name for name, tensor in tensors if tensor.dtype is torch.float32}
