"""Modules for proofs: of the same class as a model's, on the CPU in float32, with random weights."""

from __future__ import annotations

import torch


def fresh(module: torch.nn.Module, *args, **options) -> torch.nn.Module:
    """A module of the same class and options, but for those given, with random weights, on the CPU in float32.

    args: of its constructor, which makes its buffers.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        made = type(module)(*args).float().eval()
    vars(made).update(numeric_options(module) | options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            is_matrix = parameter.dim() == 2 and not name.endswith("ape")
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if is_matrix else noise)
    return made


def numeric_options(module: torch.nn.Module) -> dict:
    """Numbers that its code reads."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, (int, float))}
    return {name: value for name, value in found.items() if name not in ("training", "layer_idx")}
