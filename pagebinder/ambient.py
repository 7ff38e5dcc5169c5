"""What a caller's thread may be in the middle of, and what concerns nobody here: autocast, another compilation,
`torch.compile` of the caller.

A model is compiled, and its steps run, in the dtypes that its weights and its own code say: `torch.autocast` around
them changes nothing. Compilations of a process take turns, as torch's tracing is one for all threads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

P, R = ParamSpec("P"), TypeVar("R")
AUTOCAST = ("cpu", "cuda")  # device types

_turn = threading.RLock()
_owner: int | None = None


def inference() -> contextlib.AbstractContextManager:
    """A block without gradients, and without a caller's autocast."""
    return _plain_inference() if _autocast() else torch.inference_mode()


def alone(function: Callable[P, R]) -> Callable[P, R]:
    """A function during which no other thread compiles, and no autocast is on."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        global _owner
        with _turn, without_autocast():
            before, _owner = _owner, threading.get_ident()
            try:
                return function(*args, **kwargs)
            finally:
                _owner = before

    return run


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs as it is, also where `torch.compile` has compiled its caller: nothing traces into it."""

    as_it_is: list[Callable[P, R]] = []

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        dynamo = sys.modules.get("torch._dynamo")  # whose import takes seconds, and which does nothing before
        if dynamo is None:
            return function(*args, **kwargs)
        if not as_it_is:
            as_it_is.append(dynamo.disable(function))
        return as_it_is[0](*args, **kwargs)

    return run


def is_compiled_elsewhere() -> bool:
    """Does another thread compile just now?"""
    return _owner not in (None, threading.get_ident())


is_compiled_elsewhere._dynamo_marked_constant = True  # Dynamo asks once, as it traces: it knows no threads


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on this device, where it is on."""
    if device.type not in AUTOCAST or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device_type in _autocast():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextlib.contextmanager
def _plain_inference() -> Iterator[None]:
    with without_autocast(), torch.inference_mode():
        yield


def _autocast() -> list[str]:
    return [device_type for device_type in AUTOCAST if torch.is_autocast_enabled(device_type)]


def _in_child() -> None:
    """A thread that compiled stayed with the parent."""
    global _turn, _owner
    _turn, _owner = threading.RLock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
