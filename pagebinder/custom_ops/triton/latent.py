"""`pagebinder_triton::latent_cache_write` and `paged_mla_attention`: latent rows of every layout.

    q_nope [T, H, N] -- w_k --> q [T, H, L | P] --attend, K = V = latent rows--> [T, H, L] -- w_v --> [T, H, V]

    rows          all of a request's, plain,       lists of rows, rows of bytes, and those of 64 heads and more,
                  of few heads                     which fill a product of the tensor cores
    attention     kernels of `paged_attention`     kernel of `sparse_mla`, a query token at a time; groups are listed
                                                   token by token first

The absorbed form for every request: rows are read once for all heads of a program, as K and, their first L channels,
as V. The products with w_k and w_v are batched ones of the library. Prefill would take less arithmetic with expanded
K and V, as on the CPU, but its sizes depend on lengths that only the device knows.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.latent.layouts import require, rows_per_block
from pagebinder.custom_ops.latent.write import check_rows
from pagebinder.custom_ops.mla.groups import listed_tokens
from pagebinder.custom_ops.mla.mla import check_mla_operands
from pagebinder.custom_ops.mla.paged_mla import stored_rope
from pagebinder.custom_ops.triton.cache_write import kv_cache_write
from pagebinder.custom_ops.triton.norm_rope import store_rows
from pagebinder.custom_ops.triton.paged_attention import attend_paged
from pagebinder.custom_ops.triton.sparse_mla import sparse_mla_attention

MAX_LATENT_DIM = 512
# On an H200 kernels of `paged_attention` made 74 TFLOP/s of 128 heads, that of `sparse_mla` 255 of 64.
HEADS_BY_TOKEN = 64


def latent_cache_write(rows, cache, slot_mapping, *, layout="plain", rope_dim=0) -> None:
    """See `latent_cache_write_reference`; a slot outside the cache is not written."""
    check_rows(rows, cache, slot_mapping, layout, rope_dim)
    if layout == "plain" and rows.dtype == cache.dtype:
        kv = rows.unsqueeze(1)
        kv_cache_write(kv, kv[..., :0], cache.unsqueeze(1), slot_mapping)
    else:
        store_rows(rows, cache, slot_mapping, layout, rope_dim)


def paged_mla_attention(
    q_nope, q_rope, w_k, w_v, cache, table, seq_lens, query_start_loc, indices=None, sinks=None, *, scale,
    window=None, layout="plain", ratio=1,
):  # fmt: skip
    """See `paged_mla_attention_reference`."""
    check_mla_operands(q_nope, q_rope, w_k, w_v, indices, sinks, ratio)
    (num_tokens, num_heads, _), latent_dim = q_nope.shape, w_k.shape[2]
    require(latent_dim <= MAX_LATENT_DIM, f"latent rows of {latent_dim} channels: at most {MAX_LATENT_DIM}")
    require(layout != "plain" or cache.dtype == q_nope.dtype, "q and cache must have the same dtype")
    rope_dim = stored_rope(layout, q_rope.shape[2])
    rows_per_block(cache, layout, latent_dim + q_rope.shape[2], rope_dim)
    for name, tensor, dims in (
        ("table", table, 2), ("seq_lens", seq_lens, 1), ("query_start_loc", query_start_loc, 1)
    ):  # fmt: skip
        fits = tensor.dtype == torch.int32 and tensor.dim() == dims
        require(fits, f"{name} must be int32 with {dims} dimension(s)")
    fits = len(seq_lens) <= len(table) and len(query_start_loc) == len(seq_lens) + 1
    require(fits, "table, seq_lens and query_start_loc must have at least R, R and R + 1 rows")
    if ratio > 1:
        indices, _ = listed_tokens(indices, seq_lens, query_start_loc, ratio, window)
        window = None
    q = q_nope.new_empty((num_tokens, num_heads, latent_dim + q_rope.shape[2]))
    q[..., :latent_dim] = torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1)
    q[..., latent_dim:] = q_rope
    is_few = num_heads < HEADS_BY_TOKEN or q.dtype.itemsize > 2
    if layout == "plain" and indices is None and is_few:
        attended = attend_paged(
            q, cache.unsqueeze(1), table, seq_lens, query_start_loc, sinks, None, head_dim_v=latent_dim, scale=scale,
            window=window, v_is_k=True,
        )  # fmt: skip
    else:
        paged, nothing = (cache, table), (None, None)
        in_window = indices is None and window is not None
        of_window, of_all = (paged, nothing) if in_window else (nothing, paged)
        attended = sparse_mla_attention(
            q, *of_window, *of_all, indices, seq_lens, query_start_loc, sinks, scale=scale, ratio=1,
            window=window if in_window else 0, entry_window=0 if in_window else window or 0,
            head_dim_v=latent_dim, layout=layout, rope_dim=rope_dim,
        )  # fmt: skip
    return torch.bmm(attended.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1).contiguous()
