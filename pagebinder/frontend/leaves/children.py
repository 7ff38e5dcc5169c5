"""Leaves for a child module of torch's own that mixes tokens, where a model calls it directly.

    RWKV              time_shift = ZeroPad2d((0, 0, 1, -1))      each token sees the one before it
    RecurrentGemma    conv_1d = Conv1d(groups=channels)          the causal convolution in front of its recurrence

For the time of the capture the child's `forward` is ours, which emits one `short_conv`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf


@dataclass(frozen=True, kw_only=True)
class ChildLeaf(Leaf):
    """For the child `child` of modules of some classes, `forward(child, x)` is called in its place."""

    child: str
    forward: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]

    def modules(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The children, by path.

        Raises:
            CaptureError: a module of these classes has no such child.
        """
        parents = Leaf.modules(self, model)
        lacking = [path for path, parent in parents.items() if not hasattr(parent, self.child)]
        if lacking:
            raise CaptureError(self._changed(f"{lacking[0]} has no {self.child}"))
        return {f"{path}.{self.child}": getattr(parent, self.child) for path, parent in parents.items()}

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for child in self.modules(model).values():
                child.forward = partial(self.forward, child)
                undo.callback(delattr, child, "forward")
            yield


def time_shift(pad: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x [1, T, C] -> the row before each row, zeros first."""
    if type(pad) is not torch.nn.ZeroPad2d or tuple(pad.padding) != (0, 0, 1, -1) or x.shape[0] != 1:
        raise CaptureError(
            f"{pad} does not shift the tokens of one sequence by one; its meaning is not known."
        )
    before, itself = (torch.full((x.shape[2], 1), tap, dtype=x.dtype, device=x.device) for tap in (1.0, 0.0))
    taps = torch.cat([before, itself], dim=1)
    return torch.ops.pagebinder.short_conv(x[0], taps, None, activation=None).unsqueeze(0)


def causal_convolution(conv: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x [1, C, T] -> [1, C, T], the part of the source's result that it keeps: what lies behind it is cut off."""
    taps = conv.weight.shape[-1]
    known = type(conv) is torch.nn.Conv1d and conv.groups == conv.in_channels == conv.out_channels
    known = known and conv.padding == (taps - 1,) and conv.stride == conv.dilation == (1,)
    if not known or conv.padding_mode != "zeros" or x.shape[0] != 1:
        raise CaptureError(f"{conv} is not a causal depthwise convolution of one sequence.")
    out_TC = torch.ops.pagebinder.short_conv(
        x[0].transpose(0, 1), conv.weight[:, 0], conv.bias, activation=None
    )
    return out_TC.transpose(0, 1).unsqueeze(0)
