"""Leaf: Inkling 2's short convolution whose taps each token makes for itself.

    source    windows [T, C, K] of the tokens before, times the taps of the token [T, heads, K], and those of weights
    here      the rows l tokens back, l < K, which short_conv fetches by a tap of 1 among zeros; the sum is traced

A tap of 1 is exact. The state of l tokens back is l rows, so K (K - 1) / 2 rows are kept in place of K - 1.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.fresh_modules import fresh
from pagebinder.frontend.leaves.functions import require_plain

SHORT_CONV = torch.ops.pagebinder.short_conv.default
PROBED_TOKENS, PROBED_WIDTH = 9, 3


def rows_back(x_TC: torch.Tensor, lag: int) -> torch.Tensor:
    """[T, C] of the token `lag` before, zeros before the first."""
    if lag == 0:
        return x_TC
    taps = pad(torch.ones(x_TC.shape[1], 1, dtype=x_TC.dtype, device=x_TC.device), (0, lag))
    return SHORT_CONV(x_TC, taps, None, activation=None)


def dynamic_short_conv(self, hidden_states, dynamic_input, cache=None, conv_mask=None, **kwargs):
    """Inkling2DynamicShortConvolution.forward: [1, T, C] by taps of dynamic_input [1, T, hidden] -> [1, T, C]."""
    require_plain(type(self).__name__, hidden_states, kwargs)
    if cache is not None or conv_mask is not None:
        raise CaptureError(f"{type(self).__name__} is given a cache, or a mask, during capture.")
    taps = self.conv_kernel_size
    of_token = self.weight_proj(dynamic_input[0]).float().unflatten(-1, (self.num_heads, 1, taps))
    of_weights = self.static_weight.float().unflatten(1, (self.num_heads, -1))  # [K, heads, width]
    x = hidden_states[0].float()
    total = x
    for lag in range(taps):
        weight_THW = of_weights[lag] + of_token[..., lag]
        total = total + rows_back(x, lag) * weight_THW.flatten(1)
    return (total / math.sqrt(2 * taps + 1)).to(hidden_states.dtype).unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class TokenConvolution(Leaf):
    def expected(self, module: torch.nn.Module) -> Counter:
        return Counter({SHORT_CONV: module.conv_kernel_size - 1})

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        """Raises CaptureError: a module of this class computes something else than ours."""
        for module in self.modules(model).values():
            self._prove(module)
        with Leaf.patched(self, model):
            yield

    def _prove(self, module: torch.nn.Module) -> None:
        heads, taps, hidden = module.num_heads, module.conv_kernel_size, module.weight_proj.in_features
        generator = torch.Generator().manual_seed(0)
        small = fresh(module, heads * PROBED_WIDTH, hidden, heads, taps, 0, 0)
        with torch.no_grad():
            x = torch.randn(1, PROBED_TOKENS, heads * PROBED_WIDTH, generator=generator)
            states = torch.randn(1, PROBED_TOKENS, hidden, generator=generator)
            theirs, ours = small(x, states), dynamic_short_conv(small, x, states)
        if not torch.allclose(theirs, ours, atol=1e-4):
            raise CaptureError(self._changed(f"{type(module).__name__} computes something else"))


TOKEN_CONVOLUTION = TokenConvolution(
    name="convolution by taps of each token",
    classes=("Inkling2DynamicShortConvolution",),
    functions={"Inkling2DynamicShortConvolution.forward": dynamic_short_conv},
    emits=(SHORT_CONV,),
    seen_on=("5.23", "5.24"),
)
TOKEN_CONVOLUTION_OF_LOOPS = TokenConvolution(
    name=TOKEN_CONVOLUTION.name,
    classes=("Inkling2LoopDynamicShortConvolution",),
    functions={"Inkling2LoopDynamicShortConvolution.forward": dynamic_short_conv},
    emits=(SHORT_CONV,),
    seen_on=("5.24",),
)
