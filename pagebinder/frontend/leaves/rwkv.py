"""Leaves: RWKV-4. Its attention and its feed-forward layers look one token back, and attention sums over the past."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.children import ChildLeaf, time_shift
from pagebinder.frontend.leaves.functions import require_no_state, require_plain


def rwkv_linear_attention(time_decay, time_first, key, value, state=None, return_state=False):
    """time_decay and time_first [W], key and value [1, T, W] -> ([1, T, W], None)."""
    require_plain("rwkv_linear_attention", key, {})
    require_no_state("rwkv_linear_attention", state, return_state)
    out = torch.ops.pagebinder.wkv(key[0], value[0], -torch.exp(time_decay.float()), time_first)
    return out.unsqueeze(0), None


@dataclass(frozen=True, kw_only=True)
class RescaledRwkv(Leaf):
    """The source divides the weights of its layers in place the first time that it runs in eval mode: do it now."""

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        for module in model.modules():
            if type(module).__name__ == "RwkvModel" and not module.layers_are_rescaled:
                training, module.training = module.training, False
                module._rescale_layers()
                module.training = training
        with Leaf.patched(self, model):
            yield


RWKV_ATTENTION = RescaledRwkv(
    name="rwkv attention",
    classes=("RwkvSelfAttention",),
    functions={"rwkv_linear_attention": rwkv_linear_attention},
    emits=(torch.ops.pagebinder.wkv.default,),
    seen_on=("5.23", "5.24"),
)

RWKV_SHIFT = ChildLeaf(
    name="rwkv token shift",
    classes=("RwkvSelfAttention", "RwkvFeedForward"),
    functions={},
    emits=(torch.ops.pagebinder.short_conv.default,),
    seen_on=("5.23", "5.24"),
    child="time_shift",
    forward=time_shift,
)
