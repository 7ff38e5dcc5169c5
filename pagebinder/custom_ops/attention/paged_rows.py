"""What references of attention over pages go through: each request's new tokens, and the keys that they may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from pagebinder.custom_ops.query_starts import query_starts


class RequestRows(NamedTuple):
    """Of one request: where its new tokens stand in the step, their positions p [Q], and its keys at positions
    j [K]: k [K, G, D], v [K, G, Dv]."""

    tokens: slice
    p: torch.Tensor
    j: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def rows_of_requests(
    q_THD, kv_cache_NGBE, block_table_RM, seq_lens_R, query_start_loc, window
) -> Iterator[RequestRows]:
    """Every request with new tokens; operands as in `paged_attention`. Keys before the first window are left out:
    their blocks may be gone.

    Raises:
        ValueError: query_start_loc does not rise, or a length exceeds the block table.
    """
    head_dim, block_size = q_THD.shape[2], kv_cache_NGBE.shape[2]
    starts = query_starts(query_start_loc, len(q_THD))
    for r, seq_len in enumerate(seq_lens_R.tolist()):
        start, end = starts[r], starts[r + 1]
        if start == end:
            continue
        if seq_len > block_table_RM.shape[1] * block_size:
            raise ValueError("a seq_len exceeds its block table")
        first_query = seq_len - (end - start)
        first_key = 0 if window is None else max(0, first_query - window + 1)
        p = torch.arange(first_query, seq_len, device=q_THD.device)
        j = torch.arange(first_key, seq_len, device=q_THD.device)
        kv = kv_cache_NGBE[block_table_RM[r].long()[j // block_size], :, j % block_size]
        yield RequestRows(slice(start, end), p, j, kv[..., :head_dim], kv[..., head_dim:])
