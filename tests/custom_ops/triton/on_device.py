"""Runs ops of the triton provider where its kernels run: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebinder.custom_ops.providers import registered_providers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def moved_to_device(x):
    if isinstance(x, (list, tuple)):
        return [moved_to_device(item) for item in x]
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


@dataclass(frozen=True)
class TritonOnDevice:
    """Takes and gives tensors of the CPU, so that tests of the other providers can use it as one of them."""

    name: str = "triton"

    def overload(self, op: str):
        provider = registered_providers()["triton"]
        provider.prepare(op)
        overload = provider.overload(op)

        def call(*operands, **options):
            moved = [moved_to_device(x) for x in operands]
            results = overload(*moved, **options)
            for argument, theirs, ours in zip(overload._schema.arguments, operands, moved):
                if argument.alias_info is not None and argument.alias_info.is_write and ours is not theirs:
                    theirs.copy_(ours)
            if isinstance(results, tuple):
                return tuple(x.cpu() for x in results)
            return None if results is None else results.cpu()

        return call
