"""`pagebinder::packed_attention`, `packed_relative_attention`: many whole sequences in one call, without padding.

    rows of q, k, v    |  sequence 0  |seq. 1|     sequence 2      |  padding  |
    query_start_loc    0              5      8                     16          T

An encoder is given its sequences whole, so nothing is cached: each sequence attends within its own rows.
T tokens, R sequences, H query heads, G KV heads, D width of q and k, Dv width of v, N distances of a bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from pagebinder.custom_ops.attention.relative import relative_attention_reference
from pagebinder.custom_ops.attention.semantic import attention_reference
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.query_starts import query_starts


def packed_attention_reference(
    q_THD, k_TGD, v_TGD, query_start_loc, sinks=None, alibi_slopes=None, **options
):
    """`attention` of each sequence by itself.

    Args:
        q_THD: queries [T, H, D]. k_TGD: keys [T, G, D]. v_TGD: values [T, G, Dv]; H is a multiple of G.
        query_start_loc: [R+1] int32, the first row of each sequence; rows from entry R on are padding.
        sinks, alibi_slopes, options: as `attention_reference`; window and chunk count within a sequence.
    Returns:
        [T, H, Dv] in q's dtype, zeros for padding.
    Raises:
        ValueError: query_start_loc does not rise from 0 to at most T.
    """
    out = q_THD.new_zeros((*q_THD.shape[:2], v_TGD.shape[2]))
    for rows in _rows_of_sequences(query_start_loc, len(q_THD)):
        out[rows] = attention_reference(q_THD[rows], k_TGD[rows], v_TGD[rows], sinks, alibi_slopes, **options)
    return out


def packed_relative_attention_reference(q_THD, k_TGD, v_TGD, query_start_loc, bias, sinks=None, **options):
    """`relative_attention` of each sequence by itself; padding and errors as above, bias and sinks as there."""
    out = q_THD.new_zeros((*q_THD.shape[:2], v_TGD.shape[2]))
    for rows in _rows_of_sequences(query_start_loc, len(q_THD)):
        of_rows = (
            bias[rows] if bias.dim() == 3 else bias,
            sinks[rows] if sinks is not None and sinks.dim() == 2 else sinks,
        )
        out[rows] = relative_attention_reference(q_THD[rows], k_TGD[rows], v_TGD[rows], *of_rows, **options)
    return out


def overlapping_blocks(k_TGD, v_TGD, query_start_loc, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of packed tokens side by side, as a paged cache that needs no rounding of sequences to blocks.

        block n          the rows of the tokens n .. n + block_size - 1: blocks overlap
        block table      of a sequence from token s on: s, s + block_size, ...

    The rows behind the last token exist only as addresses: a kernel that keeps to lengths does not read them.

    Returns:
        (cache [T, G, block_size, D + Dv], block table [R, blocks of T tokens] int32)
    """
    (num_tokens, num_kv_heads, width), width_v = k_TGD.shape, v_TGD.shape[2]
    rows = k_TGD.new_empty((num_tokens + block_size, num_kv_heads, width + width_v))
    torch.cat([k_TGD, v_TGD], dim=-1, out=rows[:num_tokens])
    token, head, _ = rows.stride()
    shape = (num_tokens, num_kv_heads, block_size, width + width_v)
    begins = torch.arange(0, max(num_tokens, 1), block_size, dtype=torch.int32, device=k_TGD.device)
    return rows.as_strided(shape, (token, head, token, 1)), query_start_loc[:-1, None] + begins


def _rows_of_sequences(query_start_loc: torch.Tensor, num_tokens: int) -> Iterator[slice]:
    starts = query_starts(query_start_loc, num_tokens)
    return (slice(begin, end) for begin, end in itertools.pairwise(starts) if begin < end)


def _packed_attention_fake(q, k, v, query_start_loc, *_, **__):
    torch._check(q.dim() == 3 and k.dim() == 3 and v.dim() == 3, lambda: "attention takes [T, heads, width]")
    torch._check(q.shape[1] % k.shape[1] == 0, lambda: "query heads must be a multiple of KV heads")
    torch._check(q.shape[2] == k.shape[2], lambda: "q and k must have the same width")
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


PACKED_ATTENTION = define_op(
    "packed_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor? sinks=None, Tensor? alibi_slopes=None, *, "
    "float scale, int? window=None, int? chunk=None, float? soft_cap=None, bool causal=True) -> Tensor",
    reference=packed_attention_reference,
    fake=_packed_attention_fake,
)

PACKED_RELATIVE_ATTENTION = define_op(
    "packed_relative_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor query_start_loc, Tensor bias, Tensor? sinks=None, *, float scale, "
    "int num_behind, int? window=None, bool causal=True) -> Tensor",
    reference=packed_relative_attention_reference,
    fake=_packed_attention_fake,
)
