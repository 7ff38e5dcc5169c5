"""`pagebinder_triton::unified_attention`, `attention_part`, `merge_attention_states`: launches.

    c   this step's K and V side by side, as a cache of 16-token blocks that begin at any token; then as any cache
    s   shared_kernel over tiles of sharers' tokens, in splits, and merge_kernel
    u   the kernels of paged attention, over the keys of each request from the shared ones on

Every part gives [T, H, DV] and [H, T] in float32, and one kernel merges them. Launches follow from shapes, so what
the reference checks by reading lengths, leaders and tokens is not checked here; what is out of range is not read.
"""

from __future__ import annotations

import torch
import triton

from pagebinder.custom_ops.attention.merge_states import check_states
from pagebinder.custom_ops.attention.packed import overlapping_blocks
from pagebinder.custom_ops.attention.paged import check_options
from pagebinder.custom_ops.attention.unified import PARTS, check_unified
from pagebinder.custom_ops.triton.attention_kernels import merge_kernel
from pagebinder.custom_ops.triton.packed_attention import BLOCK
from pagebinder.custom_ops.triton.paged_attention import (
    MAX_HEADS_OF_TILE,
    MIN_KEYS_OF_SPLIT,
    Widths,
    attend_paged,
    merge_options,
    num_splits,
    padded,
    tiles_of,
    with_positive_scale,
)
from pagebinder.custom_ops.triton.provider import MAX_HEAD_DIM
from pagebinder.custom_ops.triton.unified_kernels import merge_states_kernel, shared_kernel

MERGES_OF_REQUEST = 64  # programs that share the tokens of a long prompt
SHARED_ROWS = 64  # of a tile: most decodes of a group fit, and the others read the keys from the L2 cache


def unified_attention(*operands, phases, head_dim_v, **options):
    """See `unified_attention_reference`."""
    paged, sinks, alibi_slopes, k, v = _checked(*operands, phases=phases, head_dim_v=head_dim_v, **options)
    if phases == "--u":
        return attend_paged(*paged[:5], sinks, alibi_slopes, head_dim_v=head_dim_v, **options)
    q = paged[0]
    parts = [part for part in PARTS if part in phases]
    outs, lses = _states(q, len(parts), head_dim_v)
    for part, out, lse in zip(parts, outs, lses):
        _attend(part, phases, *paged, alibi_slopes, k, v, out, lse, head_dim_v=head_dim_v, **options)
    result = torch.empty(outs.shape[1:], dtype=q.dtype, device=q.device)
    _merge(outs, lses, sinks, result, None)
    return result


def attention_part(*operands, part, phases, head_dim_v, **options):
    """See `attention_part_reference`."""
    paged, _, alibi_slopes, k, v = _checked(*operands, phases=phases, head_dim_v=head_dim_v, **options)
    if len(part) != 1 or part not in phases or part == "-":
        raise ValueError(f"part {part!r} is none of phases {phases!r}")
    (out,), (lse,) = _states(paged[0], 1, head_dim_v)
    _attend(part, phases, *paged, alibi_slopes, k, v, out, lse, head_dim_v=head_dim_v, **options)
    return out, lse


def merge_attention_states(outs, lses, sinks=None):
    """See `merge_attention_states_reference`."""
    check_states(outs, lses, sinks)
    out = torch.empty(outs[0].shape, dtype=outs[0].dtype, device=outs[0].device)
    lse = torch.empty(lses[0].shape, dtype=torch.float32, device=out.device)
    _merge(torch.stack(list(outs)), torch.stack(list(lses)), sinks, out, lse)
    return out, lse


def _checked(
    q, kv_cache, block_table, seq_lens, query_start_loc, shared_lens, shared_leaders, shared_tokens, sinks=None,
    alibi_slopes=None, k=None, v=None, *, phases, head_dim_v, scale, window=None, soft_cap=None,
) -> tuple:  # fmt: skip
    """((q, cache, table, lens, starts, shared lens, leaders, tokens), sinks, alibi_slopes, k, v), once they fit."""
    paged = (q, kv_cache, block_table, seq_lens, query_start_loc, shared_lens, shared_leaders, shared_tokens)
    check_unified(*paged, sinks, alibi_slopes, k, v, phases=phases, head_dim_v=head_dim_v)
    check_options(window=window, soft_cap=soft_cap)
    widest = max(q.shape[2], head_dim_v)
    if widest > MAX_HEAD_DIM:
        raise ValueError(f"heads of {widest} channels: at most {MAX_HEAD_DIM} are served")
    return paged, sinks, alibi_slopes, k, v


def _states(q: torch.Tensor, count: int, head_dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _ = q.shape
    outs = torch.empty((count, num_tokens, num_heads, head_dim_v), dtype=torch.float32, device=q.device)
    return outs, torch.empty((count, num_heads, num_tokens), dtype=torch.float32, device=q.device)


def _attend(
    part, phases, q, kv_cache, block_table, seq_lens, query_start_loc, shared_lens, shared_leaders, shared_tokens,
    alibi_slopes, k, v, out, lse, **options,
) -> None:  # fmt: skip
    if part == "s":
        _shared(
            q, kv_cache, block_table, seq_lens, query_start_loc, shared_lens, shared_leaders, shared_tokens,
            alibi_slopes, out, lse, **options,
        )  # fmt: skip
    elif part == "c":
        rows, table = overlapping_blocks(k, v, query_start_loc, BLOCK)
        news = query_start_loc[1:] - query_start_loc[:-1]
        steps = (table, news, query_start_loc)  # no keys but this step's: nothing to split
        attend_paged(q, rows, *steps, None, alibi_slopes, out=out, lse=lse, splits=1, **options)
    else:
        attend_paged(
            q, kv_cache, block_table, seq_lens, query_start_loc, None, alibi_slopes, out=out, lse=lse,
            key_begins=shared_lens if "s" in phases else None, context_only="c" in phases, **options,
        )  # fmt: skip


def _shared(
    q, kv_cache, block_table, seq_lens, query_start_loc, shared_lens, shared_leaders, shared_tokens, alibi_slopes,
    out, lse, *, head_dim_v, scale, window=None, soft_cap=None,
) -> None:  # fmt: skip
    (num_tokens, num_heads, head_dim), num_requests = q.shape, len(seq_lens)
    if num_tokens == 0 or num_requests == 0:
        out.zero_(), lse.fill_(float("-inf"))
        return
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    q, scale = with_positive_scale(q, scale)
    widths = Widths.of(head_dim, head_dim_v)
    (queries, *prefill), _ = tiles_of(widths.D_A + widths.D_B + widths.BLOCK_DV, q.dtype)
    keys, warps, stages = prefill
    group = num_heads // num_kv_heads
    heads = min(group, MAX_HEADS_OF_TILE)
    chunks = triton.cdiv(group, heads)
    wanted = min(queries, SHARED_ROWS, triton.next_power_of_2(heads * num_tokens))
    rows = max(16, triton.next_power_of_2(heads), wanted)
    tiles = triton.cdiv(num_tokens, rows // heads)
    capacity = block_table.shape[1] * block_size
    splits = num_splits(tiles * num_kv_heads * chunks, capacity, q.device)
    parts = torch.empty((num_tokens, num_heads, splits, head_dim_v), dtype=torch.float32, device=q.device)
    part_lse = torch.full((num_tokens, num_heads, splits), float("-inf"), device=q.device)
    shared_kernel[splits, num_kv_heads * chunks, tiles](
        q, kv_cache, block_table, seq_lens, query_start_loc, shared_lens, shared_leaders, shared_tokens, alibi_slopes,
        parts, part_lse, *q.stride()[:2], block_table.stride(0), num_tokens, num_requests, num_blocks, capacity,
        scale, soft_cap, *kv_cache.stride()[:3], SPLITS=splits, MIN_KEYS=MIN_KEYS_OF_SPLIT,
        BISECTIONS=num_requests.bit_length(), GROUP=group, HEADS=heads, CHUNKS=chunks, **vars(widths), BLOCK_M=rows,
        BLOCK_N=keys, BLOCK_SIZE=block_size, WINDOW=window or 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    of_request = triton.cdiv(num_tokens, max(1, num_requests))
    merge_kernel[num_requests + 1, num_heads, min(of_request, MERGES_OF_REQUEST)](
        parts, part_lse, query_start_loc, None, out, lse, None, num_tokens, num_requests, num_tokens, 0,
        SPLITS=splits, **merge_options(splits, widths.BLOCK_DV), DV=head_dim_v, BLOCK_DV=widths.BLOCK_DV,
        PADDING=True,
    )  # fmt: skip


def _merge(outs, lses, sinks, out, lse) -> None:
    parts, num_tokens, num_heads, head_dim_v = outs.shape
    if num_tokens == 0:
        return
    merge_states_kernel[num_tokens, num_heads](
        outs,
        lses,
        sinks,
        out,
        lse,
        num_tokens,
        PARTS=parts,
        DV=head_dim_v,
        BLOCK_DV=padded(head_dim_v),
        num_warps=1,
    )
