"""The language model inside a multimodal one, and what it is called with.

model(input_ids, pixel_values, ...)  ->  language_model(inputs_embeds, attention_mask, ...)    seen, and no further
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pagebinder.errors import RequestError

EMBEDS, MASK = "inputs_embeds", "attention_mask"


class _ReachedLanguageModel(Exception):
    """Ends the call of a source model whose language model was called. `given`: with these arguments, by name."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given


def language_model(model: torch.nn.Module) -> torch.nn.Module | None:
    """The innermost module that takes embeddings in the place of the model's tokens, if there is one."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    found = [
        module
        for module in model.modules()
        if module is not model
        and EMBEDS in _parameters(module)
        and any(part is embedding for part in module.modules())
    ]
    return found[-1] if embedding is not None and found else None


def _parameters(module: torch.nn.Module) -> list[str]:
    """Names of what a module is called with. Of its class: the forward of an instance may be replaced for a while."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def given_to(
    language_model: torch.nn.Module, model: torch.nn.Module, inputs: dict[str, Any]
) -> dict[str, Any]:
    """What the language model is called with, by name, when the model is called with `inputs`.

    Raises:
        RequestError: the model raises, or does not come to its language model.
    """
    names = _parameters(language_model)

    mine = threading.get_ident()

    def stop(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != mine:  # somebody else's call of the model goes on
            return
        raise _ReachedLanguageModel(dict(zip(names, args)) | kwargs)

    hook = language_model.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**{**inputs, "use_cache": False})
    except _ReachedLanguageModel as reached:
        if not isinstance(reached.given.get(EMBEDS), torch.Tensor):
            reached.given[EMBEDS] = model.get_input_embeddings()(inputs["input_ids"])
            reached.given.pop("input_ids", None)
        return reached.given
    except Exception as error:
        kinds = ", ".join(sorted(inputs))
        raise RequestError(f"{type(model).__name__} cannot be called with {kinds}: {error}") from error
    finally:
        hook.remove()
    raise RequestError(f"{type(model).__name__} does not call its language model with these inputs.")


@contextlib.contextmanager
def entering(inner: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Calls of the language model `inner` that are given embeddings are given `change` of them."""
    names = _parameters(inner)

    def give(
        module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        given = dict(zip(names, args)) | kwargs
        if not isinstance(given.get(EMBEDS), torch.Tensor):
            return None
        return (), {**given, EMBEDS: change(given[EMBEDS])}

    hook = inner.register_forward_pre_hook(give, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
