"""Blocks in which a token learns of others without attention: each must be refused, but for `LEGAL`, which see few
earlier tokens and nothing else."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class _Plain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.ones(width))


class TokenShift(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)


class NextToken(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1)


class MeanOverTokens(_Plain):
    def forward(self, x, position_ids):
        return x - self.mix * x.mean(1, keepdim=True)


class CumSum(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * x.cumsum(1) / (position_ids[..., None] + 1)


class LargestPosition(_Plain):
    def forward(self, x, position_ids):
        return x * (1 + self.mix / (1 + position_ids.max()))


class LastToken(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * x[:, -1:]


class Convolution(_Plain):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.taps = nn.Conv1d(width, width, 3, groups=width, padding=2)

    def forward(self, x, position_ids):
        return x + self.taps(x.mT)[..., : x.shape[1]].mT


class ConvolutionAhead(Convolution):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.taps.padding = (1,)


class SoftmaxOverTokens(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * x.softmax(1)


class LinearAttention(_Plain):
    def forward(self, x, position_ids):
        return x + x @ (x.mT @ x) / 64


class NumberOfTokens(_Plain):
    def forward(self, x, position_ids):
        return x * x.shape[1] ** -0.1


class RandomDrop(_Plain):
    def forward(self, x, position_ids):
        return F.dropout(x, 0.1, training=True)


class RunningBuffer(_Plain):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x, position_ids):
        self.seen.add_(0.1)
        return x + self.seen


class RouterOverTokens(_Plain):
    """Expert choice: each of four experts scales the tokens that suit it best."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.router = nn.Linear(width, 4)

    def forward(self, x, position_ids):
        scores = self.router(x)
        return x + self.mix * (scores >= scores.amax(1, keepdim=True) - 0.5).float().sum(-1, keepdim=True)


class PositionsFromTheFirst(_Plain):
    def forward(self, x, position_ids):
        place = (position_ids - position_ids[:, :1]).float()
        return x * (1 + self.mix * (place / 64).cos()[..., None])


class Roll(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * torch.roll(x, 1, dims=1)


class Pooling(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * F.avg_pool1d(x.mT, 3, stride=1, padding=1).mT


class Padding(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * F.pad(x, (0, 0, 1, 0))[:, :-1]


class PaddingBehind(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * F.pad(x, (0, 0, 0, 1))[:, 1:]


class DeviationOverTokens(_Plain):
    def forward(self, x, position_ids):
        return x / (1 + self.mix * x.std(1, keepdim=True, correction=0))


class Sorted(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * x.sort(1).values


class TriangleProduct(_Plain):
    """The mean of all tokens so far, as a product with a triangle of ones."""

    def forward(self, x, position_ids):
        t = x.shape[1]
        return x + self.mix * (torch.ones(t, t).tril() @ x) / (position_ids[..., None] + 1)


class AttentionWithoutSoftmax(_Plain):
    def forward(self, x, position_ids):
        hidden = position_ids[0][None, :] > position_ids[0][:, None]
        return x + 0.02 * (x @ x.mT).relu().masked_fill(hidden, 0.0) @ x


class NormOverTokens(_Plain):
    def forward(self, x, position_ids):
        y = x.mT
        return x + self.mix * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).mT


class Gather(_Plain):
    def forward(self, x, position_ids):
        return x + self.mix * x.gather(1, (position_ids // 2)[..., None].expand_as(x))


MIXERS = {
    "positions from the first": PositionsFromTheFirst,
    "roll": Roll,
    "pooling": Pooling,
    "padding behind": PaddingBehind,
    "deviation over tokens": DeviationOverTokens,
    "sorted": Sorted,
    "triangle product": TriangleProduct,
    "attention without softmax": AttentionWithoutSoftmax,
    "norm over tokens": NormOverTokens,
    "gather": Gather,
    "router over tokens": RouterOverTokens,
    "next token": NextToken,
    "mean over tokens": MeanOverTokens,
    "cumsum": CumSum,
    "largest position": LargestPosition,
    "last token": LastToken,
    "convolution ahead": ConvolutionAhead,
    "softmax over tokens": SoftmaxOverTokens,
    "linear attention": LinearAttention,
    "number of tokens": NumberOfTokens,
    "random drop": RandomDrop,
    "running buffer": RunningBuffer,
}
LEGAL = {"token shift": TokenShift, "convolution": Convolution, "padding": Padding}
