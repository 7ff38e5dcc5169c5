"""Token sequences -> the inputs of a packed encoder, in batches of a bounded number of tokens.

    sequences   a a a a a | b b | c c c c c c c | d d d        max_tokens = 8
    batches     a a a a a b b        c c c c c c c        d d d

Sequences keep their order: with no padding there is nothing to gain from sorting them by length. A sequence is never
cut, so one that is longer than the budget is a batch of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MIN_ROWS = 2  # the graph's sizes are symbols of at least 2


@dataclass(frozen=True)
class EncoderBatch:
    """Sequences [first, first + R) of a call. `starts`, `lengths`: [R] int64 on the CPU."""

    first: int
    inputs: dict[str, torch.Tensor]
    starts: torch.Tensor
    lengths: torch.Tensor


def batches(
    sequences: Sequence[Sequence[int]], max_tokens: int, device: torch.device
) -> Iterator[EncoderBatch]:
    """All sequences (each of at least one token), in batches of at most `max_tokens` tokens where they fit."""
    first, used = 0, 0
    for i, sequence in enumerate(sequences):
        if used and used + len(sequence) > max_tokens:
            yield _batch(sequences[first:i], first, device)
            first, used = i, 0
        used += len(sequence)
    if first < len(sequences):
        yield _batch(sequences[first:], first, device)


def _batch(sequences: Sequence[Sequence[int]], first: int, device: torch.device) -> EncoderBatch:
    lengths = torch.tensor([len(s) for s in sequences], device="cpu")
    ends = lengths.cumsum(0)
    starts = ends - lengths
    num_tokens = int(ends[-1])
    num_rows = max(num_tokens, MIN_ROWS)
    ids = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
    ids[:num_tokens] = torch.tensor(list(itertools.chain.from_iterable(sequences)), device="cpu")
    positions = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
    positions[:num_tokens] = torch.arange(num_tokens, device="cpu") - starts.repeat_interleave(lengths)
    query_start_loc = torch.zeros(len(sequences) + 1, dtype=torch.int32, device="cpu")
    query_start_loc[1:] = ends
    inputs = {"input_ids": ids, "positions": positions, "query_start_loc": query_start_loc}
    return EncoderBatch(first, {name: t.to(device) for name, t in inputs.items()}, starts, lengths)
