"""Norms as people write them: their tails differ in where the weight comes in."""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """tail: cast_scale, scale_cast, offset (1 + w) or none."""

    def __init__(self, width: int, tail: str, eps: float = 1e-5) -> None:
        super().__init__()
        self.tail, self.eps = tail, eps
        self.weight = None if tail == "none" else nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.tail == "none":
            return h.to(x.dtype)
        if self.tail == "cast_scale":
            return self.weight * h.to(x.dtype)
        return (h * (1.0 + self.weight.float() if self.tail == "offset" else self.weight)).to(x.dtype)


class WrittenLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias


def norm_of(kind: str, width: int) -> nn.Module:
    """A norm over the last dimension, of `width` channels."""
    if kind.startswith("rms "):
        return RMSNorm(width, kind.removeprefix("rms "))
    makers = {"torch rms": nn.RMSNorm, "layer norm": nn.LayerNorm, "written layer norm": WrittenLayerNorm}
    return makers[kind](width) if kind in makers else nn.Identity()
