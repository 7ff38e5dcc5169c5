"""`pagebinder_triton::packed_attention` and `packed_relative_attention`: whole sequences, by the kernels of pages.

    k, v      | sequence 0: 21 tokens    | sequence 1: 3 | ...       one row of K and V a token
    blocks    | 0: 0-15   | 16: 16-31 ...                            BLOCK rows from any token on: they overlap
    table     [[0, 16], [21, 37], ...]                               a sequence's last block runs into the next one

K and V of a token are put side by side, which is the one copy made: the lengths stay on the device.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.paged import check_attention
from pagebinder.custom_ops.attention.relative import check_bias
from pagebinder.custom_ops.triton.paged_attention import attend_paged

BLOCK = 16  # tokens


def packed_attention(q, k, v, query_start_loc, sinks=None, alibi_slopes=None, **options):
    """See `packed_attention_reference`."""
    return _attend(q, k, v, query_start_loc, sinks, alibi_slopes, **options)


def packed_relative_attention(q, k, v, query_start_loc, bias, *, num_behind, **options):
    """See `packed_relative_attention_reference`."""
    check_bias(q, bias, num_behind)
    return _attend(q, k, v, query_start_loc, None, None, bias=bias, num_behind=num_behind, **options)


def _attend(q, k, v, query_start_loc, sinks, alibi_slopes, **options) -> torch.Tensor:
    if not (q.dim() == k.dim() == v.dim() == 3 and len(q) == len(k) == len(v)):
        raise ValueError(f"q, k and v must be [T, heads, width], not {[list(x.shape) for x in (q, k, v)]}")
    if k.shape[1] != v.shape[1] or not q.dtype == k.dtype == v.dtype:
        raise ValueError("k and v must have as many heads as each other, and q, k and v one dtype")
    q = q if q.stride(2) == 1 else q.contiguous()
    rows, table = own_cache(k, v, query_start_loc)
    operands = (q, rows, table, query_start_loc.diff(), query_start_loc, sinks, alibi_slopes)
    check_attention(*operands, v.shape[2])
    return attend_paged(*operands, head_dim_v=v.shape[2], splits=1, **options)


def own_cache(k, v, query_start_loc) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [T, G, BLOCK, D+DV], which overlap; table [R, blocks]): a block begins at every 16th token of each
    request."""
    (num_tokens, num_kv_heads, width), width_v = k.shape, v.shape[2]
    rows = k.new_empty((num_tokens + BLOCK, num_kv_heads, width + width_v))
    torch.cat([k, v], dim=-1, out=rows[:num_tokens])
    token, head, _ = rows.stride()
    blocks = rows.as_strided((num_tokens, num_kv_heads, BLOCK, width + width_v), (token, head, token, 1))
    begins = torch.arange(0, max(num_tokens, 1), BLOCK, dtype=torch.int32, device=k.device)
    return blocks, query_start_loc[:-1, None] + begins
