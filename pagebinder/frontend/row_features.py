"""Features of images that a language model adds to its states behind its first layers (deepstack: Qwen3-VL).

    layer 0 -> x [1, T, C]      x[visual_pos_masks] += deepstack_visual_embeds[0]       the source
                                x + row_features(x, 0)                                  while capturing

A graph of text has none of it. So that prompts may bring such features with their embeddings, the language model is
told to add them, and the method that adds them is ours, for the time of the capture.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch

from pagebinder.custom_ops.prompt_rows import ROW_FEATURES
from pagebinder.frontend.language_model import language_model

ADDED_TO, ADDED, METHOD = "visual_pos_masks", "deepstack_visual_embeds", "_deepstack_process"
WHERE_SAID = "deepstack_visual_indexes"


def num_features(model: torch.nn.Module) -> int:
    """Behind how many layers features are added; 0: none, or in a way that is not known here."""
    inner = language_model(model)
    if inner is None or not hasattr(type(inner), METHOD):
        return 0
    takes = inspect.signature(inner.forward).parameters
    if ADDED_TO not in takes or ADDED not in takes:
        return 0
    configs = (model.config, getattr(model.config, "vision_config", None))
    return next(
        (len(getattr(config, WHERE_SAID)) for config in configs if getattr(config, WHERE_SAID, None)), 0
    )


@contextlib.contextmanager
def adding(inner: torch.nn.Module, mask: torch.Tensor | None, added: list) -> Iterator[None]:
    """Calls of the language model `inner` get these arguments in addition."""

    def tell(module, args, kwargs):
        return args, {**kwargs, ADDED_TO: mask, ADDED: added}

    hook = inner.register_forward_pre_hook(tell, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def as_op(inner: torch.nn.Module, count: int) -> Iterator[None]:
    """The language model `inner` adds `row_features` behind its first `count` layers."""
    setattr(inner, METHOD, lambda states, mask, number: states + ROW_FEATURES(states, number))
    try:
        with adding(inner, None, list(range(count))):
            yield
    finally:
        delattr(inner, METHOD)
