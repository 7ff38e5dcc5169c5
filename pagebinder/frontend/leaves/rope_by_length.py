"""Leaf: RoPE whose frequencies hang on the length of the sequence (rope_type "longrope" and "dynamic").

    the source                                                  while capturing
    longrope   another set of them, for all tokens, where       the frequencies that the module has
               max(positions) passes the original length
    dynamic    computed anew where it passes the longest seen

A cache keeps keys that were turned when the sequence was short. So such a model is served up to its original length,
where no token is ever turned in another way; `length_limit` tells the capture, which says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf

BY_LENGTH = ("longrope", "dynamic")


@dataclass(frozen=True, kw_only=True)
class RopeByLengthLeaf(Leaf):
    """Lets each module turn without looking at the length first."""

    def modules(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        return {
            path: module
            for path, module in model.named_modules()
            if _layer_types(module) and _without_update(module) is not None
        }

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for path, module in self.modules(model).items():
                _require_original(path, module)
                module.forward = partial(_without_update(module), module)
                undo.callback(delattr, module, "forward")
            yield


ROPE_BY_LENGTH = RopeByLengthLeaf(
    name="RoPE by length", classes=(), functions={}, emits=(), seen_on=("5.17", "5.23", "5.24")
)


def length_limit(model: torch.nn.Module) -> int | None:
    """The longest sequence whose tokens are all turned by the original frequencies; None: any."""
    modules = ROPE_BY_LENGTH.modules(model).values()
    limits = [_original_length(module, kind) for module in modules for kind in _layer_types(module)]
    return min(limits, default=None)


def _layer_types(module: torch.nn.Module) -> list[str | None]:
    """Of which layers the frequencies hang on the length; [None]: of all."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    return [layers for layers, kind in kinds.items() if kind in BY_LENGTH]


def _without_update(module: torch.nn.Module) -> Callable | None:
    """forward(self, x, position_ids, ...) behind transformers' `dynamic_rope_update`; None: it is not around it."""
    function, is_updated = type(module).forward, False
    while hasattr(function, "__wrapped__"):
        is_updated |= function.__code__.co_qualname.startswith("dynamic_rope_update.")
        function = function.__wrapped__
    return function if is_updated else None


def _original_length(module: torch.nn.Module, layers: str | None) -> int:
    kinds, config = module.rope_type, module.config
    kind = kinds[layers] if layers is not None else kinds
    if kind == "dynamic":
        return int(module.original_max_seq_len)
    parameters = config.rope_parameters if layers is None else config.rope_parameters[layers]
    return int(parameters["original_max_position_embeddings"])


def _require_original(path: str, module: torch.nn.Module) -> None:
    for layers in _layer_types(module):
        prefix = "" if layers is None else f"{layers}_"
        now, original = (getattr(module, prefix + name) for name in ("inv_freq", "original_inv_freq"))
        if now.is_meta or original.is_meta or torch.equal(now.to(original.device), original):
            continue
        raise CaptureError(
            f"{path} has the frequencies of a sequence beyond its original length, which it ran last: run the model "
            "on a short one, or load it again."
        )
