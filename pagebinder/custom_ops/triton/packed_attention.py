"""`pagebinder_triton::packed_attention` and `packed_relative_attention`: whole sequences, by the kernels of pages.

K and V of a token are put side by side, which is the one copy made: the lengths stay on the device.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.packed import overlapping_blocks
from pagebinder.custom_ops.attention.paged import check_attention
from pagebinder.custom_ops.attention.relative import check_bias, check_sinks
from pagebinder.custom_ops.triton.paged_attention import attend_paged

BLOCK = 16  # tokens


def packed_attention(q, k, v, query_start_loc, sinks=None, alibi_slopes=None, **options):
    """See `packed_attention_reference`."""
    if sinks is not None and sinks.dim() != 1:
        raise ValueError("sinks must be float32 [H]")
    return _attend(q, k, v, query_start_loc, sinks, alibi_slopes, **options)


def packed_relative_attention(q, k, v, query_start_loc, bias, sinks=None, *, num_behind, **options):
    """See `packed_relative_attention_reference`."""
    check_bias(q, bias, num_behind)
    check_sinks(q, sinks)
    return _attend(q, k, v, query_start_loc, sinks, None, bias=bias, num_behind=num_behind, **options)


def _attend(q, k, v, query_start_loc, sinks, alibi_slopes, **options) -> torch.Tensor:
    if not (q.dim() == k.dim() == v.dim() == 3 and len(q) == len(k) == len(v)):
        raise ValueError(f"q, k and v must be [T, heads, width], not {[list(x.shape) for x in (q, k, v)]}")
    if k.shape[1] != v.shape[1] or not q.dtype == k.dtype == v.dtype:
        raise ValueError("k and v must have as many heads as each other, and q, k and v one dtype")
    q = q if q.stride(2) == 1 else q.contiguous()
    rows, table = overlapping_blocks(k, v, query_start_loc, BLOCK)
    operands = (q, rows, table, query_start_loc.diff(), query_start_loc)
    of_heads = (
        None if sinks is None or sinks.dim() == 2 else sinks
    )  # [T, H]: of a caller that has checked them
    check_attention(*operands, of_heads, alibi_slopes, v.shape[2])
    return attend_paged(*operands, sinks, alibi_slopes, head_dim_v=v.shape[2], splits=1, **options)
