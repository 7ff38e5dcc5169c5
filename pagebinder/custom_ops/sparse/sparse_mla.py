"""`pagebinder::sparse_mla_attention`: attention over paged latent rows, recent tokens and chosen entries together.

    window_cache  rows of tokens                  entry_cache  rows of entries (`ratio` tokens each)
    +----------------------+                      +----------------------+
    | block: n rows of D   | row j: block j // n  | block: m rows of D   | entry w: block w // m, row w % m
    +----------------------+ of window_table      +----------------------+ of entry_table

    query at p:   tokens p - window < j <= p      entries w < (p+1) // ratio, only those in indices if there are any
                  |_______________________ one softmax, with the sink of the head ___________|

A row is the key of all heads, its leading part the value: multi-query attention. What a row's bytes mean is its
layout's matter (custom_ops/latent/layouts.py); quantised rows are decoded to bfloat16. Without a window this is
DeepSeek sparse attention over the latents of all tokens (ratio 1) or over what a compressor made; without entries it
is plain sliding-window attention.

T tokens, R requests, H query heads, D width of a row, Dv leading part that serves as V, K entries of a list,
M blocks per request at most.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.semantic import visible_keys
from pagebinder.custom_ops.latent.layouts import load_rows, require, rows_per_block
from pagebinder.custom_ops.library import define_op
from pagebinder.custom_ops.query_starts import query_starts
from pagebinder.custom_ops.sparse.semantic import attend_to_rows, visible_entries


def gather_rows(cache, blocks, rows_R, layout: str, rope_dim: int, width: int) -> torch.Tensor:
    """Rows number `rows_R` of a request whose blocks are `blocks` [M], decoded: float32 [len(rows_R), width].

    Quantised rows are decoded to bfloat16, which loses something for "fp8_v32" only.
    """
    n = rows_per_block(cache, layout, width, rope_dim)
    require(len(rows_R) == 0 or int(rows_R.max()) < n * len(blocks), "a seq_len exceeds its block table")
    ids = blocks.long()[rows_R // n]
    require(bool(((ids >= 0) & (ids < len(cache))).all()), "a block id in a table is not valid")
    rows = load_rows(cache, ids * n + rows_R % n, layout, width, rope_dim)
    return rows if layout == "plain" else rows.to(torch.bfloat16).float()


def requests_of(seq_lens_R, query_start_loc, num_tokens: int):
    """For every request with new tokens: (r, slice of its tokens, their absolute positions)."""
    starts = query_starts(query_start_loc, num_tokens)
    for r, seq_len in enumerate(seq_lens_R.tolist()):
        num_new = starts[r + 1] - starts[r]
        require(seq_len >= 0, "seq_lens must not be negative")
        if num_new > 0:
            p = torch.arange(seq_len - num_new, seq_len, device=seq_lens_R.device)
            yield r, slice(starts[r], starts[r + 1]), p


def sparse_mla_attention_reference(
    q_THD,
    window_cache,
    window_table,
    entry_cache,
    entry_table,
    indices_TK,
    seq_lens_R,
    query_start_loc,
    sinks,
    *,
    scale: float,
    window: int,
    ratio: int,
    head_dim_v: int,
    layout: str = "plain",
    rope_dim: int = 0,
):
    """Attention of a mixed batch (prefill chunks and decodes) to latent rows.

    Args:
        q_THD: queries [T, H, D], last stride 1. The cache holds the rows of the new tokens already.
        window_cache, window_table: rows of tokens and their tables [R or more, M] int32; both None if window is 0.
            Rows that no query of a request sees are never read, so their blocks may be gone.
        entry_cache, entry_table: the same of entries; both None = none. Both caches have the same layout.
        indices_TK: [T, K] int32, numbers of a request's entries (not slots), each once; -1 is unused, and an entry
            that the query does not see is left out. None = all that it sees.
        seq_lens_R: [R] int32 with the new tokens. query_start_loc: [R+1] int32; tokens behind it are padding.
        sinks: [H] float32 logit that joins the softmax without a value.
        window: in tokens, 0 = none. ratio: tokens per entry. head_dim_v: Dv.
        layout, rope_dim: of the rows, see custom_ops/latent/layouts.py.
    Returns:
        [T, H, Dv] in q's dtype, computed in float32; zeros for padding and for a query that sees nothing.
    Raises:
        ValueError: shapes or dtypes do not fit, a length exceeds a table, or a block id is not valid.
    """
    check_operands(
        q_THD, window_cache, window_table, entry_cache, entry_table, indices_TK, seq_lens_R, query_start_loc,
        sinks, window, ratio, head_dim_v,
    )  # fmt: skip
    num_tokens, num_heads, width = q_THD.shape
    out = q_THD.new_zeros((num_tokens, num_heads, head_dim_v))
    for r, mine, p in requests_of(seq_lens_R, query_start_loc, num_tokens):
        rows = [q_THD.new_zeros((0, width)).float()]
        visible = [torch.zeros((len(p), 0), dtype=torch.bool, device="cpu")]
        if window > 0:
            j = torch.arange(max(0, int(p[0]) - window + 1), int(p[-1]) + 1, device="cpu")
            rows.append(gather_rows(window_cache, window_table[r], j, layout, rope_dim, width))
            visible.append(visible_keys(p[:, None], j[None], window=window))
        if entry_cache is not None:
            w = torch.arange(max(0, int(p[-1]) + 1) // ratio, device="cpu")
            rows.append(gather_rows(entry_cache, entry_table[r], w, layout, rope_dim, width))
            listed = None if indices_TK is None else indices_TK[mine]
            visible.append(visible_entries(p, len(w), ratio, listed))
        attended = attend_to_rows(
            q_THD[mine], torch.cat(rows), torch.cat(visible, dim=1), sinks, scale, head_dim_v
        )
        out[mine] = attended.to(q_THD.dtype)
    return out


def check_operands(
    q, window_cache, window_table, entry_cache, entry_table, indices, seq_lens, starts, sinks, window, ratio,
    head_dim_v,
) -> None:  # fmt: skip
    require(q.dim() == 3 and q.stride(2) == 1, "q is [T, H, D], its last stride 1")
    require(0 < head_dim_v <= q.shape[2], "head_dim_v must be between 1 and D")
    require(window >= 0 and ratio > 0, "window must not be negative, ratio must be positive")
    require(window == 0 or window_cache is not None, "a window needs window_cache")
    for name, cache, table in (
        ("window", window_cache, window_table),
        ("entry", entry_cache, entry_table),
    ):
        require((cache is None) == (table is None), f"{name}_cache and {name}_table go together")
        if cache is not None:
            check_cache(q, cache, f"{name}_cache")
            check_table(table, seq_lens, f"{name}_table")
    check_lengths(seq_lens, starts)
    require(indices is None or entry_cache is not None, "indices without entry_cache")
    fits = indices is None or (indices.dtype == torch.int32 and indices.dim() == 2 and len(indices) == len(q))
    require(fits, "indices must be int32 [T, K]")
    fits = sinks is None or (sinks.dtype == torch.float32 and sinks.shape == q.shape[1:2])
    require(fits, "sinks must be float32 [H]")


def check_cache(q, cache, name: str) -> None:
    """A plain cache [N, n, D] holds rows of q's dtype, a quantised one [N, page bytes] is uint8."""
    if cache.dtype == torch.uint8:
        require(cache.dim() == 2 and cache.stride(1) == 1, f"{name} of bytes must be [N, page_bytes]")
        return
    require(cache.dim() == 3 and cache.shape[2] == q.shape[-1], f"{name} must be [N, n, {q.shape[-1]}]")
    require(cache.dtype == q.dtype, f"q and {name} must have the same dtype")
    require(cache.stride(2) == 1, f"the last stride of {name} must be 1")


def check_table(table, seq_lens, name: str) -> None:
    require(table.dtype == torch.int32 and table.dim() == 2, f"{name} must be int32 [R, M]")
    require(len(table) >= len(seq_lens), f"{name} must have at least one row a request")


def check_lengths(seq_lens, starts) -> None:
    require(seq_lens.dtype == torch.int32 and seq_lens.dim() == 1, "seq_lens must be int32 [R]")
    require(starts.dtype == torch.int32, "query_start_loc must be int32")
    require(starts.shape == (len(seq_lens) + 1,), "query_start_loc must have one entry more than seq_lens")


def _fake(q, *operands, head_dim_v, **_):
    torch._check(q.dim() == 3, lambda: "q is [T, H, D]")
    torch._check(0 < head_dim_v <= q.shape[2], lambda: "head_dim_v must be between 1 and D")
    return q.new_empty((q.shape[0], q.shape[1], head_dim_v))


SPARSE_MLA_ATTENTION = define_op(
    "sparse_mla_attention",
    "(Tensor q, Tensor? window_cache, Tensor? window_table, Tensor? entry_cache, Tensor? entry_table, "
    "Tensor? indices, Tensor seq_lens, Tensor query_start_loc, Tensor? sinks, *, float scale, int window, int ratio, "
    'int head_dim_v, str layout="plain", int rope_dim=0) -> Tensor',
    reference=sparse_mla_attention_reference,
    fake=_fake,
)
