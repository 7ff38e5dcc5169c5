"""`pagebinder::paged_mla_attention`: multi-head latent attention over paged latent rows.

Legend of `mla.py`; R requests, D = L + P width of a row, B rows (tokens) of a block, M blocks of a request.

    cache [blocks, B, D]                one row                       written by `latent_cache_write`
      block 0   block 1                 +----------------+---------+
      +-------+ +-------+               | latent (L)     | k_rope  |   576 values a token in DeepSeek-V3, where
      | r0 t4 | | r1 t0 |               +----------------+---------+   expanded keys and values are 40,960
      |  ...  | |  ...  |
      +-------+ +-------+   row of position p: block table[r, p // B], row p % B

Queries lie flat as in `attention.paged`: request r has the tokens [query_start_loc[r], query_start_loc[r + 1]), and
its query i is at position seq_len - query_len + i. Tokens from query_start_loc[R] on are padding.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.custom_ops.latent.layouts import rows_per_block
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.mla.mla import attend_expanded, check_mla_operands, listed_keys
from pagebinder.custom_ops.query_starts import query_starts
from pagebinder.custom_ops.sparse.sparse_mla import gather_rows


def paged_mla_attention_reference(
    q_nope,
    q_rope,
    w_k,
    w_v,
    cache,
    table,
    seq_lens,
    query_start_loc,
    indices=None,
    sinks=None,
    *,
    scale,
    window=None,
    layout="plain",
    ratio=1,
):
    """MLA of a mixed batch (prefill chunks, decodes, extends) over rows that already hold the new tokens'.

    Args:
        q_nope: [T, H, N]. q_rope: [T, H, P]. w_k: [H, N, L]. w_v: [H, V, L]; of one dtype.
        cache: [blocks, B, L + P] of q's dtype (layout "plain", last stride 1, otherwise any strides), or the bytes
            of another layout of `latent.layouts`.
        table: [R or more, M] int32. seq_lens: [R] int32, with the new tokens. query_start_loc: [R + 1] int32.
        indices: [T, K] int32, positions in the request that each query sees, -1 = none; None = all. With a ratio
            above 1: groups of `ratio` tokens, as in `mla_attention`.
        sinks: [H] float32 logit that joins the softmax without a value.
        scale: of the scores. window: key j is seen from p iff p - window < j.
    Returns:
        [T, H, V] in q's dtype, zeros for padding and for a query that sees no key.
    Raises:
        ValueError: shapes or dtypes do not fit, a length exceeds the table, or an index or block id is not valid.
    """
    check_mla_operands(q_nope, q_rope, w_k, w_v, indices, sinks, ratio)
    out = q_nope.new_zeros((*q_nope.shape[:2], w_v.shape[1]))
    _, starts, lens = check_step(q_nope, q_rope, w_k, cache, table, seq_lens, query_start_loc, layout)
    latent_dim, rope_dim = w_k.shape[2], q_rope.shape[2]
    for r, seq_len in enumerate(lens):
        step = slice(starts[r], starts[r + 1])
        p = torch.arange(step.start - step.stop, 0, device=q_nope.device) + seq_len
        j = torch.arange(seq_len, device=q_nope.device)
        visible = visible_keys(p[:, None], j[None], window=window)
        if indices is not None:
            visible = visible & listed_keys(indices[step], seq_len, p, ratio)
        j, visible = j[visible.any(0)], visible[:, visible.any(0)]
        rows = gather_rows(cache, table[r], j, layout, stored_rope(layout, rope_dim), latent_dim + rope_dim)
        latent, k_rope = rows.split((latent_dim, rope_dim), dim=1)
        operands = (q_nope[step], q_rope[step], latent, k_rope, w_k, w_v)
        out[step] = attend_expanded(*operands, visible, scale, sinks)
    return out


def stored_rope(layout, rope_dim) -> int:
    """The op argument rope_dim of a layout: channels that it stores otherwise than the rest."""
    return 0 if layout == "plain" else rope_dim


def check_step(q_nope, q_rope, w_k, cache, table, seq_lens, query_start_loc, layout):
    """(rows of a block, query_start_loc, seq_lens as lists).

    Raises:
        ValueError: cache, table and lengths do not fit the queries or each other.
    """
    for name, tensor, dims in (
        ("table", table, 2), ("seq_lens", seq_lens, 1), ("query_start_loc", query_start_loc, 1)
    ):  # fmt: skip
        if tensor.dtype != torch.int32 or tensor.dim() != dims:
            raise ValueError(f"{name} must be int32 with {dims} dimension(s)")
    if len(seq_lens) > len(table) or len(query_start_loc) != len(seq_lens) + 1:
        raise ValueError("table, seq_lens and query_start_loc must have at least R, R and R + 1 rows")
    if layout == "plain" and cache.dtype != q_nope.dtype:
        raise ValueError("q and cache must have the same dtype")
    width, rope_dim = w_k.shape[2] + q_rope.shape[2], q_rope.shape[2]
    block_size = rows_per_block(cache, layout, width, stored_rope(layout, rope_dim))
    starts, lens = query_starts(query_start_loc, len(q_nope)), seq_lens.tolist()
    if lens and not 0 <= min(lens) <= max(lens) <= table.shape[1] * block_size:
        raise ValueError("a seq_len exceeds its block table")
    return block_size, starts, lens


def _paged_mla_attention_fake(
    q_nope, q_rope, w_k, w_v, cache, table, seq_lens, query_start_loc, indices=None, sinks=None, **_
):
    torch._check(q_nope.dim() == 3 and q_rope.dim() == 3, lambda: "queries are [T, heads, width]")
    return q_nope.new_empty((q_nope.shape[0], q_nope.shape[1], w_v.shape[1]))


PAGED_MLA_ATTENTION = define_op(
    "paged_mla_attention",
    "(Tensor q_nope, Tensor q_rope, Tensor w_k, Tensor w_v, Tensor cache, Tensor table, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor? indices=None, Tensor? sinks=None, *, float scale, int? window=None, "
    "str layout='plain', int ratio=1) -> Tensor",
    reference=paged_mla_attention_reference,
    fake=_paged_mla_attention_fake,
)
