"""Modules around a model: those that surely compute what it computes are taken off, so that the model is compiled.

    torch.compile(model)                            model, in its own Python code
    DataParallel, DistributedDataParallel           model
    peft's models with adapters inside of layers    the base model, whose layers hold the adapters (LoRA and its kin)
    peft's models that learn prompts                refused: they put rows of their own before every prompt

Of any other module around a transformers model (a value head, a `forward(*args, **kwargs)`) its own code is compiled;
what the model inside says of its vocabulary, its length and its ends is true of it, too.
"""

from __future__ import annotations

import torch

from pagebinder.errors import CaptureError

DATA_PARALLEL = {"DataParallel", "DistributedDataParallel"}
PEFT_MODELS = {"PeftModel", "PeftMixedModel"}
ADD_TO_LOSS = {"AdaLoraModel"}


def is_transformers(module: torch.nn.Module) -> bool:
    return any(c.__name__ == "PreTrainedModel" for c in type(module).__mro__)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside of transparent wrappers.

    Raises:
        CaptureError: a wrapper has hooks, which would be lost, or learns prompts.
    """
    while (inner := _inside(module)) is not None:
        own = vars(module)
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            raise CaptureError(
                f"This {type(module).__name__} around a {type(inner).__name__} has hooks of its own, and what is "
                "compiled is the model inside: register them there."
            )
        module = inner
    return module


def transformers_inside(module: torch.nn.Module) -> torch.nn.Module | None:
    """The one transformers model among a module's children, or theirs where there is one child."""
    children = [_innermost(child) for child in module.children()]
    found = [child for child in children if is_transformers(child)]
    if len(found) == 1:
        return found[0]
    return transformers_inside(children[0]) if len(children) == 1 else None


def said_inside(module: torch.nn.Module, name: str):
    """An attribute (`config`, `generation_config`) of the module, or of the text model that it is built around."""
    own = getattr(module, name, None)
    if own is not None or is_transformers(module):
        return own
    inner = transformers_inside(module)
    return getattr(inner, name, None) if inner is not None and inner.can_generate() else None


def _innermost(module: torch.nn.Module) -> torch.nn.Module:
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def _inside(module: torch.nn.Module) -> torch.nn.Module | None:
    """The model in a wrapper whose forward is its library's own."""
    kinds = type(module).__mro__
    package = _package(next(c for c in kinds if "forward" in vars(c)))
    patched = "forward" in vars(module)
    names = {c.__name__ for c in kinds if _package(c) == package}
    if package == "torch" and "OptimizedModule" in names:
        by_torch = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        return module._orig_mod if by_torch or not patched else None
    if patched or package not in ("torch", "peft"):
        return None
    if package == "torch":
        return module.module if names & DATA_PARALLEL else None
    if names & PEFT_MODELS:
        return _adapted_by(_without_prompts(module).base_model)
    return _adapted_by(module) if "BaseTuner" in names else None


def _package(kind: type) -> str:
    return kind.__module__.split(".")[0]


def _without_prompts(model: torch.nn.Module) -> torch.nn.Module:
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        kind = str(config.peft_type).split(".")[-1]
        raise CaptureError(
            f"{type(model).__name__} is not served: it puts rows that it has learnt ({kind}) before every prompt, "
            "and rows of a graph are the tokens that it is given. Adapters inside of layers (LoRA and its kin) are "
            "served."
        )
    return model


def _adapted_by(tuner: torch.nn.Module) -> torch.nn.Module | None:
    """The model whose layers a tuner of peft has replaced; None: it does something else with every call (X-LoRA)."""
    forwards = [
        c.__name__ for c in type(tuner).__mro__ if "forward" in vars(c) and c.__name__ not in ADD_TO_LOSS
    ]
    if any(getattr(c, "alora_invocation_tokens", None) for c in tuner.peft_config.values()):
        raise CaptureError(
            "an activated LoRA is not served: it begins at tokens that it looks for in each prompt "
            "(alora_invocation_tokens), and a graph does the same with every token."
        )
    return tuner.model if forwards[0] == "BaseTuner" else None
