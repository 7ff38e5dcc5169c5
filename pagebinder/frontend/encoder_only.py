"""Encoders (BERT, RoBERTa, DistilBERT, ModernBERT, T5's first half, ...) as one graph over flat tokens.

    captured(input_ids [T], positions [T]) -> hidden states [T, C], or logits [T, V] of a model with a head

The positions are those within a sequence, from 0 on. Families that come from fairseq number their positions from
padding_idx + 1 on and leave padding out; that offset is added here (`numbering.py`), and a sequence that contains the
padding token would be numbered otherwise, so it is refused when it is encoded. Token types are zero.

That all of this is what the source model does by itself is not assumed: `compiler/encoder.py` compares the packed
graph with `source_rows`, the source given nothing but the ids, on sequences longer than every window.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

from pagebinder.frontend.capture import token_inputs, trace
from pagebinder.frontend.grad_mode import same_grad_mode_untraced
from pagebinder.frontend.leaves.given_positions import GivenPositions, given_positions
from pagebinder.frontend.leaves.relative_bias import bias_by_distance
from pagebinder.frontend.numbering import numbering
from pagebinder.frontend.python_state import evaluation_mode, unchanged
from pagebinder.frontend.source import ModelSource
from pagebinder.frontend.unpadded import said_for_unpadded

MASK_FUNCTION = "create_bidirectional_mask"
# Arguments of it that change nothing for one whole sequence.
WITHOUT_MEANING = {"position_ids", "cache_position", "allow_is_bidirectional_skip"}


class FlatTokensOfEncoder(torch.nn.Module):
    """Calls an encoder that takes [1, T] with flat [T] inputs, and returns one row for each token."""

    def __init__(self, source: torch.nn.Module, given: GivenPositions):
        super().__init__()
        self.source = source
        self.given = given
        self.offset = numbering(source).offset
        self.accepts = set(inspect.signature(type(source).forward).parameters)

    @same_grad_mode_untraced
    def forward(self, input_ids, positions):
        ids, positions = input_ids.unsqueeze(0), positions.unsqueeze(0) + self.offset
        options = {
            "position_ids": positions,
            "token_type_ids": torch.zeros_like(ids),
            "use_cache": False,
        }
        options |= said_for_unpadded(self.source, ids)
        options = {name: value for name, value in options.items() if name in self.accepts}
        with self.given.of_call(positions[0]):
            return rows_of(self.source(input_ids=ids, **options))


def rows_of(output) -> torch.Tensor:
    """What a transformers encoder returned for one sequence -> its rows [T, C or V]."""
    logits = getattr(output, "logits", None)
    return (output.last_hidden_state if logits is None else logits)[0]


def returns_logits(module: torch.nn.Module) -> bool:
    """Does the model have a head, so that its rows are logits and not hidden states?"""
    return module is not getattr(module, "base_model", module)


@contextlib.contextmanager
def no_padding_mask(module: torch.nn.Module) -> Iterator[None]:
    """Models that make their scores by hand ask for a mask although nothing is padded: they get none meanwhile.

    A call that says more than that (a mask of its own, or functions for one) is left as it is.
    """
    files = [sys.modules[name] for name in {type(part).__module__ for part in module.modules()}]
    before = [(file, getattr(file, MASK_FUNCTION)) for file in files if hasattr(file, MASK_FUNCTION)]
    try:
        for file, function in before:
            setattr(file, MASK_FUNCTION, functools.partial(_mask_unless_plain, function))
        yield
    finally:
        for file, function in before:
            setattr(file, MASK_FUNCTION, function)


def _mask_unless_plain(function, config=None, inputs_embeds=None, attention_mask=None, **kwargs):
    said = {name for name, value in kwargs.items() if value is not None} - WITHOUT_MEANING
    if attention_mask is None and not said:
        return None
    return function(config, inputs_embeds, attention_mask, **kwargs)


def capture_encoder_only(source: ModelSource) -> tuple[GraphModule, str]:
    """The encoder as a graph, and the route that led to it; errors as `capture`."""
    module = source.module
    with (
        unchanged(module),
        bias_by_distance(module),
        no_padding_mask(module),
        given_positions(module) as given,
    ):
        return trace(source, FlatTokensOfEncoder(module, given), token_inputs(source))


@torch.no_grad()
def source_rows(source: ModelSource, ids: torch.Tensor) -> torch.Tensor:
    """What the source model itself makes of one sequence: ids [T] -> [T, C or V]; raises as `unchanged`."""
    with evaluation_mode(source.module), unchanged(source.module):
        return rows_of(source.module(input_ids=ids[None]))
