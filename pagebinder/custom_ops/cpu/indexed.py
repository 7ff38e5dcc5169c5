"""`pagebinder_cpu::paged_indexed_attention`: the kernel of paged attention over chosen keys.

    requests   | d | d | prefill, all listed ...... | prefill, some listed ........ | padding |
               [each a  ][ as they are, rows of a   ][ each query a request of its  ]
               [request ][ tile share their keys    ][ own (indexed_requests.py)    ]

Where a request lists all that its queries see, as short ones do, it is plain causal attention.
"""

from __future__ import annotations

import itertools

import torch

from pagebinder.custom_ops.attention.indexed import PAGED_INDEXED_ATTENTION, check_paged
from pagebinder.custom_ops.attention.indexed_requests import as_requests, positions_of, seen_entries
from pagebinder.custom_ops.library import define_schema, library, overload
from pagebinder.custom_ops.query_starts import query_starts
from pagebinder.custom_ops.sparse.semantic import num_visible

NAMESPACE = "pagebinder_cpu"


def paged_indexed_attention(
    q, kv_cache, block_table, seq_lens, query_start_loc, indices, *, head_dim_v, scale, ratio
):
    """See `paged_indexed_attention_reference`; float32, bfloat16 or float16."""
    check_paged(q, kv_cache, block_table, seq_lens, query_start_loc, indices, head_dim_v, ratio)
    starts = query_starts(query_start_loc, len(q))
    out = q.new_zeros((*q.shape[:2], head_dim_v))
    if len(seq_lens) == 0:
        return out
    request, p = positions_of(seq_lens, query_start_loc, len(q))
    entries, num_seen = seen_entries(indices, p, ratio)
    lists_all = (num_seen == num_visible(p, ratio)).tolist()
    whole = [all(lists_all[a:b]) for a, b in itertools.pairwise(starts)]
    attend = overload(NAMESPACE, "paged_attention")
    for is_whole, group in itertools.groupby(range(len(whole)), key=whole.__getitem__):
        first, *_, last = (*group,) * 2
        step = slice(starts[first], starts[last + 1])
        if step.start == step.stop:
            continue
        if is_whole:
            rows, begins = slice(first, last + 1), query_start_loc[first : last + 2] - step.start
            operands = kv_cache, block_table[rows], seq_lens[rows], begins
        else:
            queries = request[step], p[step], entries[step], num_seen[step]
            begins = torch.arange(step.stop - step.start + 1, dtype=torch.int32, device="cpu")
            operands = *as_requests(kv_cache, block_table, *queries, ratio), begins
        out[step] = attend(q[step], *operands, head_dim_v=head_dim_v, scale=scale)
    return out


define_schema(NAMESPACE, PAGED_INDEXED_ATTENTION)
library(NAMESPACE).impl("paged_indexed_attention", paged_indexed_attention, "CPU")
