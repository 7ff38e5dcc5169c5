"""`pagebinder_cpu::packed_attention`, `packed_relative_attention`: the paged kernels over a sequence's own rows.

    K|V rows [T + T, G, D+Dv]   | row 0 | row 1 | row 2 | row 3 | ... | row T-1 | never read |
    block n of T slots            n=0 begins here;  n=2 begins here, ...

Blocks overlap: block n is the rows from n on, so a sequence that begins at row s has the block table [s] and needs no
rounding to a block size. The rows past the last token exist only as addresses and are neither written nor read.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.packed import PACKED_ATTENTION, PACKED_RELATIVE_ATTENTION
from pagebinder.custom_ops.library import define_schema, library, overload

NAMESPACE = "pagebinder_cpu"


def packed_attention(q, k, v, query_start_loc, *optional, **options):
    """See `packed_attention_reference`; q, k, v of float32, bfloat16 or float16."""
    kernel = overload(NAMESPACE, "paged_attention")
    return kernel(*_paged(q, k, v, query_start_loc), *optional, head_dim_v=v.shape[2], **options)


def packed_relative_attention(q, k, v, query_start_loc, bias, **options):
    """See `packed_relative_attention_reference`; q, k, v of float32, bfloat16 or float16."""
    kernel = overload(NAMESPACE, "paged_relative_attention")
    return kernel(*_paged(q, k, v, query_start_loc), bias, head_dim_v=v.shape[2], **options)


def _paged(q, k, v, query_start_loc) -> tuple[torch.Tensor, ...]:
    """(q, cache, block table, lengths, query_start_loc)"""
    (num_tokens, num_kv_heads, width), width_v = k.shape, v.shape[2]
    rows = k.new_empty((2 * num_tokens, num_kv_heads, width + width_v))
    torch.cat([k, v], dim=-1, out=rows[:num_tokens])
    token_stride, head_stride, _ = rows.stride()
    blocks = rows.as_strided(
        (num_tokens, num_kv_heads, num_tokens, width + width_v), (token_stride, head_stride, token_stride, 1)
    )
    starts = query_start_loc[:-1]
    return q, blocks, starts.unsqueeze(1), query_start_loc[1:] - starts, query_start_loc


for _info, _kernel in (
    (PACKED_ATTENTION, packed_attention),
    (PACKED_RELATIVE_ATTENTION, packed_relative_attention),
):
    define_schema(NAMESPACE, _info)
    library(NAMESPACE).impl(_info.name, _kernel, "CPU")
