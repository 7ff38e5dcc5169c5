"""Copies of a user's module, for another dtype or other weights: what cannot be copied is shared with the copy."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from pagebinder.errors import CaptureError

Module = TypeVar("Module", bound=nn.Module)
OF_MODULES = ("_parameters", "_buffers", "_modules")


def copied(module: Module) -> Module:
    """A deep copy. An attribute that has none (an op, a lock, an open file) is the same object in both.

    Raises:
        CaptureError: the module cannot be copied even so.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:
        shared = _without_copies(module)
        try:
            return copy.deepcopy(module, shared)
        except Exception:
            raise CaptureError(
                f"{type(module).__name__} cannot be copied ({error}), as another dtype and verify need it: give it a "
                "__deepcopy__, or convert it yourself (model.to(dtype))."
            ) from error


def _without_copies(module: nn.Module) -> dict[int, object]:
    """A memo of `deepcopy` that keeps those attributes as they are, and no more: what only leads to one of them (a
    hook of a module that has a lock) is copied."""
    # To find out, weights need not be copied.
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    values = [
        value for part in module.modules() for name, value in vars(part).items() if name not in OF_MODULES
    ]
    kept = {id(value): value for value in values if not _has_copy(value, tensors)}
    for key in list(kept):
        others = {k: v for k, v in kept.items() if k != key}
        if _has_copy(kept[key], tensors | others):
            kept = others
    return kept


def _has_copy(value: object, memo: dict[int, object]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True
