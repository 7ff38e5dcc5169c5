"""Functions of a model's code that keep what they returned (functools.lru_cache, functools.cache).

    @functools.cache
    def tables(length): ...                 made again while a model is traced, and nothing is kept

A trace runs them with tensors that have no values, a comparison in inference mode, and a model would be given those
ever after. What they hold when a trace begins are values, which it may read as constants; it is forgotten behind it
if the trace added some. Found are those that the modules of the model's classes, and the classes, have by a name.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator

import torch

_CACHE = type(functools.cache(lambda: None))


@contextlib.contextmanager
def nothing_kept(model: torch.nn.Module) -> Iterator[None]:
    """By functions of the model's code, for the duration."""
    classes = {cls for m in model.modules() for cls in type(m).__mro__ if not _is_of_torch(cls.__module__)}
    holders = [sys.modules[name] for name in {cls.__module__ for cls in classes} if name in sys.modules]
    found = [
        (h, name, f) for h in (*holders, *classes) for name, f in vars(h).items() if isinstance(f, _CACHE)
    ]
    found = [(h, name, f) for h, name, f in found if not _is_of_torch(f.__module__)]
    misses = [f.cache_info().misses for *_, f in found]
    with contextlib.ExitStack() as undo:
        for holder, name, function in found:
            if not function.cache_info().currsize:
                undo.callback(setattr, holder, name, function)
                setattr(holder, name, function.__wrapped__)
        try:
            yield
        finally:
            for (*_, function), before in zip(found, misses):
                if function.cache_info().misses != before:
                    function.cache_clear()


def _is_of_torch(module: str) -> bool:
    return module == "builtins" or module.split(".")[0] == "torch"
