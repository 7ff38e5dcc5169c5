"""Attention to chosen entries as plain paged attention: every query becomes a request of its own.

    block of 16 tokens   | 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 |       ratio = 4: four small blocks
    of a query at 13          x                   x          x  x              entries 0 and 2, and the tail
    its request          | 0 1 2 3 | 8 9 10 11 | 12 13 |                       10 tokens in three small blocks

Keys are rotated already and softmax does not ask for their order, so the result is that of the list. The small blocks
are a view of the same memory: their stride is the largest that reaches all of them.
"""

from __future__ import annotations

import math

import torch

from pagebinder.custom_ops.latent.layouts import require
from pagebinder.custom_ops.sparse.semantic import num_visible

MOST_IDS = torch.iinfo(torch.int32).max


def positions_of(seq_lens_R, query_start_loc, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(request [T], position [T]) of every query, int64; padding has a request and the position -1."""
    t = torch.arange(num_tokens, device=seq_lens_R.device)
    r = torch.searchsorted(query_start_loc[1:].long(), t, right=True).clamp_max(len(seq_lens_R) - 1)
    p = seq_lens_R[r] - query_start_loc[r + 1] + t
    return r, p.masked_fill(t >= query_start_loc[-1], -1)


def seen_entries(indices_TK, p_T, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the entries that each query sees and lists, ascending, then others [T, K] int64; how many [T])."""
    visible = num_visible(p_T, ratio)
    seen = (indices_TK >= 0) & (indices_TK < visible[:, None])
    entries = indices_TK.long().masked_fill(~seen, MOST_IDS).sort(dim=1).values
    return entries, seen.sum(1)


def as_requests(kv_cache_NGBE, block_table_RM, request_T, p_T, entries_TK, num_seen_T, ratio: int):
    """(cache, block table, lengths) of the requests that queries become; see the picture above.

    Args:
        kv_cache_NGBE, block_table_RM: as in `paged_attention`. request_T, p_T: `positions_of`. entries_TK,
            num_seen_T: `seen_entries`.
    Returns:
        cache [N', G, b, D + Dv], a view; table [T, M'] and lengths [T] int32.
    Raises:
        ValueError: the cache is too large for block numbers of 32 bits.
    """
    num_blocks, _, block_size, _ = kv_cache_NGBE.shape
    stride, slot_stride = kv_cache_NGBE.stride(0), kv_cache_NGBE.stride(2)
    small = math.gcd(block_size, ratio)
    step = math.gcd(stride, small * slot_stride)
    num_ids = ((num_blocks - 1) * stride + (block_size - small) * slot_stride) // step + 1
    require(num_ids <= MOST_IDS, "kv_cache has too many small blocks for int32 numbers")
    cache = kv_cache_NGBE.as_strided(
        (num_ids, *kv_cache_NGBE.shape[1:2], small, kv_cache_NGBE.shape[3]),
        (step, kv_cache_NGBE.stride(1), slot_stride, kv_cache_NGBE.stride(3)),
    )
    first, lengths = _first_tokens(p_T, entries_TK, num_seen_T, small, ratio)
    used = torch.arange(first.shape[1], device=p_T.device) * small < lengths[:, None]
    blocks = block_table_RM[request_T[:, None], (first // block_size).clamp(0, block_table_RM.shape[1] - 1)]
    ids = (blocks.long() * stride + first % block_size * slot_stride) // step
    in_table = (blocks >= 0) & (blocks < num_blocks) & (first < block_table_RM.shape[1] * block_size)
    return cache, ids.where(used & in_table, -1).int(), lengths.int()


def _first_tokens(p_T, entries_TK, num_seen_T, small: int, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(position of each small block's first token [T, M'], keys of each query [T])."""
    per_entry = ratio // small
    within = torch.arange(per_entry, device=p_T.device) * small
    listed = (entries_TK[:, :, None] * ratio + within).flatten(1)
    begin = num_visible(p_T, ratio) * ratio  # of the tail
    columns = torch.arange(listed.shape[1] + per_entry, device=p_T.device)
    behind = columns - num_seen_T[:, None] * per_entry  # of the last entry that is seen
    tail = begin[:, None] + behind * small
    first = torch.nn.functional.pad(listed, (0, per_entry)).where(behind < 0, tail)
    return first, num_seen_T * ratio + (p_T + 1 - begin)
