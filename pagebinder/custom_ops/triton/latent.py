"""`pagebinder_triton::latent_cache_write` and `paged_mla_attention`: latent rows as they are (layout "plain").

    q_nope [T, H, N] -- w_k --> q [T, H, L | P] --attend, K = V = latent rows--> [T, H, L] -- w_v --> [T, H, V]

The absorbed form for every request: rows are read once for all heads of a program, as K and, their first L channels,
as V. The products with w_k and w_v are batched ones of the library. Prefill would take less arithmetic with expanded
K and V, as on the CPU, but its sizes depend on lengths that only the device knows.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.latent.layouts import require, rows_per_block
from pagebinder.custom_ops.mla.mla import check_mla_operands
from pagebinder.custom_ops.triton.cache_write import kv_cache_write
from pagebinder.custom_ops.triton.paged_attention import attend_paged

MAX_LATENT_DIM = 512


def latent_cache_write(rows, cache, slot_mapping, *, layout="plain", rope_dim=0) -> None:
    """See `latent_cache_write_reference`; a slot outside the cache is not written."""
    require(layout == "plain", f"there is no kernel for the layout {layout}")
    require(rows.dim() == 2 and rows.is_floating_point(), "rows are [T, D] of a float type")
    rows_per_block(cache, layout, rows.shape[1], rope_dim)
    kv = rows.to(cache.dtype).unsqueeze(1)
    kv_cache_write(kv, kv[..., :0], cache.unsqueeze(1), slot_mapping)


def paged_mla_attention(
    q_nope, q_rope, w_k, w_v, cache, table, seq_lens, query_start_loc, indices=None, *, scale, window=None,
    layout="plain",
):  # fmt: skip
    """See `paged_mla_attention_reference`; without indices."""
    check_mla_operands(q_nope, q_rope, w_k, w_v, indices)
    require(layout == "plain", f"there is no kernel for the layout {layout}")
    require(indices is None, "there is no kernel for lists of indices")
    (num_tokens, num_heads, _), latent_dim = q_nope.shape, w_k.shape[2]
    require(latent_dim <= MAX_LATENT_DIM, f"latent rows of {latent_dim} channels: at most {MAX_LATENT_DIM}")
    require(cache.dtype == q_nope.dtype, "q and cache must have the same dtype")
    rows_per_block(cache, layout, latent_dim + q_rope.shape[2])
    for name, tensor, dims in (
        ("table", table, 2), ("seq_lens", seq_lens, 1), ("query_start_loc", query_start_loc, 1)
    ):  # fmt: skip
        fits = tensor.dtype == torch.int32 and tensor.dim() == dims
        require(fits, f"{name} must be int32 with {dims} dimension(s)")
    fits = len(seq_lens) <= len(table) and len(query_start_loc) == len(seq_lens) + 1
    require(fits, "table, seq_lens and query_start_loc must have at least R, R and R + 1 rows")
    q = q_nope.new_empty((num_tokens, num_heads, latent_dim + q_rope.shape[2]))
    q[..., :latent_dim] = torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1)
    q[..., latent_dim:] = q_rope
    attended = attend_paged(
        q, cache.unsqueeze(1), table, seq_lens, query_start_loc, None, None, head_dim_v=latent_dim, scale=scale,
        window=window, v_is_k=True,
    )  # fmt: skip
    return torch.bmm(attended.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1).contiguous()
