"""Lists of groups of tokens as lists of tokens, for kernels of latent attention that know single rows only.

    ratio = 4    tokens   0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13        a query at 13 that lists the groups 0 and 2
                 listed   0 1 2 3             8 9 10 11   12 13 -1     the tail has ratio - 1 places

What an index means is said by `attention.indexed`. Nothing is read on the host.

T queries, K groups a query.
"""

from __future__ import annotations

import torch

from pagebinder.custom_ops.attention.indexed_requests import positions_of
from pagebinder.custom_ops.sparse.semantic import num_visible


def listed_tokens(
    indices_TK, seq_lens_R, query_start_loc, ratio: int, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens that a query sees [T, K * ratio + ratio - 1] int32, -1 = none; does it list all its groups? [T] bool).

    Args:
        indices_TK: int32, each group at most once; -1, and groups that the query does not see, are left out.
        seq_lens_R, query_start_loc: as in `paged_mla_attention`. window: token j is seen from p iff p - window < j.
    """
    num_tokens, width = len(indices_TK), indices_TK.shape[1] * ratio + ratio - 1
    if len(seq_lens_R) == 0:
        return indices_TK.new_full((num_tokens, width), -1), indices_TK.new_zeros(num_tokens).bool()
    _, p_T = positions_of(seq_lens_R, query_start_loc, num_tokens)
    visible_T1, within = num_visible(p_T, ratio)[:, None], torch.arange(ratio, device=p_T.device)
    seen_TK = (indices_TK >= 0) & (indices_TK < visible_T1)
    listed = torch.where(seen_TK[..., None], indices_TK.long()[..., None] * ratio + within, -1).flatten(1)
    tail = visible_T1 * ratio + within[:-1]
    tokens = torch.cat([listed, tail.masked_fill(tail > p_T[:, None], -1)], dim=1)
    if window is not None:
        tokens = tokens.masked_fill(tokens <= p_T[:, None] - window, -1)
    return tokens.int(), seen_TK.sum(1) == visible_T1[:, 0]
