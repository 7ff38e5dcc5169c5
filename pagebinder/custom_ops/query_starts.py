"""Where the tokens of each request of a step begin.

    tokens            | r0 r0 r0 | r1 | r2 r2 | padding |         T = 8
    query_start_loc     0          3    4       6                 R + 1 = 4 entries

T tokens of the step, padding included; R requests.
"""

from __future__ import annotations

import itertools

import torch


def query_starts(query_start_loc: torch.Tensor, num_tokens: int) -> list[int]:
    """The R + 1 entries of `query_start_loc`, checked. Synchronises with its device.

    Raises:
        ValueError: they do not rise from 0 to at most `num_tokens`.
    """
    starts = query_start_loc.tolist()
    rises = all(a <= b for a, b in itertools.pairwise(starts))
    if not (rises and starts[0] == 0 and starts[-1] <= num_tokens):
        raise ValueError("query_start_loc must rise from 0 to at most T")
    return starts
