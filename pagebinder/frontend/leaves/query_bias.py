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

PROBED_TOKENS, PROBED_HEADS, PROBED_EXTENT = 11, 2, 5


def bias_by_distance(self, relative_states, query_positions, key_positions):
    """InklingRelativeLogits.forward: [1, T, H, d] -> [1, H, T, E + 1], as the head of this file says."""
    return (relative_states @ pad(self.proj.flip(-1), (1, 0))).transpose(1, 2)


def bias_of_hidden_states(self, hidden_states, relative_distance, position_ids):
    """Inkling2RelativePositionBias.forward, which makes the relative states, too: [1, T, C] -> [1, H, T, E + 1]."""
    relative_states = self.linear(hidden_states).unflatten(-1, (self.num_heads, -1))
    return bias_by_distance(self, self.norm(relative_states, position_ids), None, None)


@dataclass(frozen=True, kw_only=True)
class QueryBias(Leaf):
    """For the attention modules whose child `bias_module` makes the bias: ours stands in for its forward."""

    bias_module: str

    def modules(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        found = Leaf.modules(self, model).items()
        return {path: module for path, module in found if hasattr(module, self.bias_module)}

    @contextlib.contextmanager
    def patched(self, model: torch.nn.Module) -> Iterator[None]:
        """Raises CaptureError: the bias is another one."""
        attentions = self.modules(model)
        with contextlib.ExitStack() as undo:
            for module in attentions.values():
                bias = getattr(module, self.bias_module)
                self._prove(bias, module)
                BY_QUERY[module] = bias.rel_extent
                undo.callback(BY_QUERY.pop, module)
            undo.enter_context(Leaf.patched(self, model))
            yield

    def _prove(self, bias: torch.nn.Module, attention: torch.nn.Module) -> None:
        """Does a module of this class with random profiles give what ours does?"""
        p = torch.arange(PROBED_TOKENS)
        with torch.no_grad():
            theirs, ours = self._both(bias, attention, p)
        column = (p[None] - p[:, None] + PROBED_EXTENT).clamp(0, PROBED_EXTENT)
        ours = ours.gather(-1, column.expand_as(theirs))
        seen = p[None] <= p[:, None]
        if not torch.allclose(theirs[..., seen], ours[..., seen], atol=1e-5):
            raise CaptureError(self._changed(f"{type(bias).__name__} computes something else"))

    def _both(self, bias: torch.nn.Module, attention: torch.nn.Module, p: torch.Tensor) -> tuple:
        """(theirs [1, H, T, T], ours [1, H, T, E + 1]) of random states at the positions p."""
        small = fresh(bias, bias.proj.shape[0], PROBED_EXTENT, rel_extent=PROBED_EXTENT)
        states = _random_rows(len(p), PROBED_HEADS, bias.proj.shape[0])
        return small(states, p, p), bias_by_distance(small, states, p, p)


class HiddenQueryBias(QueryBias):
    """The bias is made of hidden states."""

    def _both(self, bias: torch.nn.Module, attention: torch.nn.Module, p: torch.Tensor) -> tuple:
        scaled = "log_scale" in bias.norm._modules
        small = fresh(bias, attention.config, PROBED_HEADS, PROBED_EXTENT, scaled, num_heads=PROBED_HEADS,
                      rel_extent=PROBED_EXTENT)  # fmt: skip
        arguments = _random_rows(len(p), bias.linear.in_features), p[:, None] - p, p[None]
        return small(*arguments), bias_of_hidden_states(small, *arguments)


def _random_rows(*shape: int) -> torch.Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))


_EMITS = (torch.ops.pagebinder.relative_attention.default,)
INKLING = QueryBias(
    name="bias by query",
    classes=("InklingAttention",),
    bias_module="rel_logits_proj",
    functions={"InklingRelativeLogits.forward": bias_by_distance},
    emits=_EMITS,
    seen_on=("5.17", "5.23", "5.24"),
)
INKLING_2 = QueryBias(
    name=INKLING.name,
    classes=("Inkling2SlidingAttention", "Inkling2FullAttention"),
    bias_module="rel_logits_proj",
    functions={"Inkling2RelativeLogits.forward": bias_by_distance},
    emits=_EMITS,
    seen_on=("5.23", "5.24"),
)
INKLING_2_HIDDEN = HiddenQueryBias(
    name=INKLING.name,
    classes=INKLING_2.classes,
    bias_module="relative_position_bias",
    functions={"Inkling2RelativePositionBias.forward": bias_of_hidden_states},
    emits=_EMITS,
    seen_on=("5.24",),
)
INKLING_2_LOOP = HiddenQueryBias(
    name=INKLING.name,
    classes=("Inkling2LoopSlidingAttention", "Inkling2LoopFullAttention"),
    bias_module="relative_position_bias",
    functions={"Inkling2LoopRelativePositionBias.forward": bias_of_hidden_states},
    emits=_EMITS,
    seen_on=("5.24",),
)
