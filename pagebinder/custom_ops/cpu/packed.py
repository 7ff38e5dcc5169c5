"""`pagebinder_cpu::packed_attention`, `packed_relative_attention`: the paged kernels over a sequence's own rows."""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.packed import (
    PACKED_ATTENTION,
    PACKED_RELATIVE_ATTENTION,
    overlapping_blocks,
)
from pagebinder.custom_ops.library import define_schema, library, overload

NAMESPACE = "pagebinder_cpu"


def packed_attention(q, k, v, query_start_loc, *optional, **options):
    """See `packed_attention_reference`; q, k, v of float32, bfloat16 or float16."""
    kernel = overload(NAMESPACE, "paged_attention")
    return kernel(*_paged(q, k, v, query_start_loc), *optional, head_dim_v=v.shape[2], **options)


def packed_relative_attention(q, k, v, query_start_loc, bias, sinks=None, **options):
    """See `packed_relative_attention_reference`; q, k, v of float32, bfloat16 or float16."""
    kernel = overload(NAMESPACE, "paged_relative_attention")
    return kernel(*_paged(q, k, v, query_start_loc), bias, sinks, head_dim_v=v.shape[2], **options)


def _paged(q, k, v, query_start_loc) -> tuple[torch.Tensor, ...]:
    """(q, cache, block table, lengths, query_start_loc); a sequence is one block."""
    cache, table = overlapping_blocks(k, v, query_start_loc, max(len(k), 1))
    return q, cache, table, query_start_loc.diff(), query_start_loc


for _info, _kernel in (
    (PACKED_ATTENTION, packed_attention),
    (PACKED_RELATIVE_ATTENTION, packed_relative_attention),
):
    define_schema(NAMESPACE, _info)
    library(NAMESPACE).impl(_info.name, _kernel, "CPU")
