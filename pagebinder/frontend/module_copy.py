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
    """A memo of `deepcopy` that keeps those attributes as they are."""
    memo = {}
    for part in module.modules():
        for name, value in vars(part).items():
            if name in OF_MODULES:
                continue
            try:
                copy.deepcopy(value)
            except Exception:
                memo[id(value)] = value
    return memo
