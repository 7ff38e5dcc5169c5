"""Leaf: Inkling's relative bias, by distance and by query.

    source    rel_logits [T, H, E] = relative states . profiles,  gathered to [T, H, keys], 0 from distance E on
    here      bias [T, H, E + 1] by distance, which `relative_attention` looks up for each key

    distance     E and beyond   E-1    ..    1    0        E: how far back there is a bias
    bias         0              profiles, mixed by the query's relative states
    column       0              1      ..   E-1   E = num_behind

The source's positions of queries and keys are its row numbers: the bias needs none, and those that scale long
contexts are recognised (recognise/row_positions.py). The module that makes the bias runs beside ours before the
capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

import pagebinder.custom_ops  # noqa: F401  (registers the ops)
from pagebinder.errors import CaptureError
from pagebinder.frontend.leaves.base import Leaf
from pagebinder.frontend.leaves.fresh_modules import fresh
from pagebinder.frontend.position_bias import BY_QUERY

BIAS_MODULE = "rel_logits_proj"
PROBED_TOKENS, PROBED_HEADS, PROBED_EXTENT = 11, 2, 5


def bias_by_distance(self, relative_states, query_positions, key_positions):
    """InklingRelativeLogits.forward: [1, T, H, d] -> [1, H, T, E + 1], as the head of this file says."""
    return (relative_states @ pad(self.proj.flip(-1), (1, 0))).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class QueryBias(Leaf):
    """For the attention modules."""

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        """Raises CaptureError: the bias is another one."""
        attentions = self.modules(model)
        with contextlib.ExitStack() as undo:
            for module in attentions.values():
                bias = getattr(module, BIAS_MODULE)
                self._prove(bias)
                BY_QUERY[module] = bias.rel_extent
                undo.callback(BY_QUERY.pop, module)
            undo.enter_context(Leaf.patched(self, model))
            yield

    def _prove(self, module: torch.nn.Module) -> None:
        """Does a module of this class with random profiles give what ours does?"""
        small = fresh(module, module.proj.shape[0], PROBED_EXTENT, rel_extent=PROBED_EXTENT)
        generator = torch.Generator().manual_seed(0)
        p = torch.arange(PROBED_TOKENS)
        with torch.no_grad():
            states = torch.randn(1, len(p), PROBED_HEADS, small.proj.shape[0], generator=generator)
            theirs = small(states, p, p)
            ours = bias_by_distance(small, states, p, p)
        column = (p[None] - p[:, None] + PROBED_EXTENT).clamp(0, PROBED_EXTENT)
        ours = ours.gather(-1, column.expand_as(theirs))
        seen = p[None] <= p[:, None]
        if not torch.allclose(theirs[..., seen], ours[..., seen], atol=1e-5):
            raise CaptureError(self._changed(f"{type(module).__name__} computes something else"))


INKLING = QueryBias(
    name="bias by query",
    classes=("InklingAttention",),
    functions={"InklingRelativeLogits.forward": bias_by_distance},
    emits=(torch.ops.pagebinder.relative_attention.default,),
    seen_on=("5.17", "5.23"),
)
INKLING_2 = QueryBias(
    name="bias by query",
    classes=("Inkling2SlidingAttention", "Inkling2FullAttention"),
    functions={"Inkling2RelativeLogits.forward": bias_by_distance},
    emits=(torch.ops.pagebinder.relative_attention.default,),
    seen_on=("5.23",),
)
