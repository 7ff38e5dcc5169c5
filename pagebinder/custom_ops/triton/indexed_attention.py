"""`pagebinder_triton::paged_indexed_attention`: the kernels of paged attention, each query a request of its own.

Nothing is read on the host, so a step can be captured. Queries of a prompt share no keys this way, not even those of
a short one that see all of them.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.indexed import check_paged
from pagebinder.custom_ops.attention.indexed_requests import as_requests, positions_of, seen_entries
from pagebinder.custom_ops.triton.paged_attention import attend_paged


def paged_indexed_attention(
    q, kv_cache, block_table, seq_lens, query_start_loc, indices, *, head_dim_v, scale, ratio
):
    """See `paged_indexed_attention_reference`."""
    check_paged(q, kv_cache, block_table, seq_lens, query_start_loc, indices, head_dim_v, ratio)
    if len(seq_lens) == 0:
        return q.new_zeros((*q.shape[:2], head_dim_v))
    request, p = positions_of(seq_lens, query_start_loc, len(q))
    cache, table, lengths = as_requests(
        kv_cache, block_table, request, p, *seen_entries(indices, p, ratio), ratio
    )
    begins = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return attend_paged(q, cache, table, lengths, begins, None, None, head_dim_v=head_dim_v, scale=scale)
