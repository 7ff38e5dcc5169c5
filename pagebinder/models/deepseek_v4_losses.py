"""What trains a Lightning Indexer: its scores should rank entries as the attention weighs them.

The selection has no gradient, so the indexer gets a loss of its own, after DeepSeek-V3.2 (section 2.1.1): the
divergence of the softmax of its scores from the attention's mass on each entry, summed over heads.
Shapes: as in `deepseek_v4_mixing`; P queries that are looked at.
"""

import torch
import torch.nn.functional as F

from pagebinder.models import deepseek_v4_mixing as mixing

QUERY_STRIDE = 4  # every so many queries are looked at: neighbours say nearly the same
IDLE_BELOW = 0.05  # an entry whose best head scores less is pushed up


@torch.no_grad()
def entry_mass(
    q: torch.Tensor, kv: torch.Tensor, entries: torch.Tensor, sinks: torch.Tensor, rows: torch.Tensor, *,
    scale: float, window: int, ratio: int,
) -> torch.Tensor:  # fmt: skip
    """The share of each entry in what queries `rows` [P] would attend to if nothing were selected: [B, P, n] float32.

    q [B, T, H, D], kv [B, T, D], entries [B, T, D] token-aligned. Rows sum to 1, or to 0 without a visible entry.
    """
    T, far_keys = kv.shape[1], entries[:, ratio - 1 :: ratio]
    q_BPHD = q[:, rows].float() * scale
    distance = rows[:, None] - torch.arange(T, device=q.device)
    near = torch.einsum("bphd,btd->bpht", q_BPHD, kv.float())
    near = near.masked_fill(~((distance >= 0) & (distance < window))[:, None], float("-inf"))
    seen = mixing.visible_entries(T, ratio, q.device)[rows]
    far = torch.einsum("bphd,bnd->bphn", q_BPHD, far_keys.float()).masked_fill(~seen[:, None], float("-inf"))
    sink = sinks.float()[:, None].expand(*far.shape[:3], 1)
    mass = torch.cat((far, near, sink), dim=-1).softmax(dim=-1)[..., : far.shape[-1]].sum(dim=2)
    return mass / mass.sum(dim=-1, keepdim=True).clamp(min=1e-12)


def indexer_loss(
    index_q: torch.Tensor, index_k: torch.Tensor, index_weights: torch.Tensor, q: torch.Tensor, kv: torch.Tensor,
    entries: torch.Tensor, sinks: torch.Tensor, *, index_scale: float, scale: float, window: int, ratio: int,
) -> torch.Tensor:  # fmt: skip
    """Mean divergence KL(attention || indexer) over queries that see an entry, in nats; 0 if none does.

    Plus a push on entries that no head scores above 0: behind the ReLU they would all tie and never learn again.
    index_q [B, T, Hi, d], index_k [B, T, d] token-aligned, index_weights [B, T, Hi]; the rest as in `entry_mass`.
    Gradients flow to the three operands of the index only.
    """
    T = q.shape[1]
    rows = torch.arange(min(ratio, T) - 1, T, min(QUERY_STRIDE, ratio), device=q.device)
    target = entry_mass(q, kv, entries, sinks, rows, scale=scale, window=window, ratio=ratio)
    keys = index_k[:, ratio - 1 :: ratio]
    if keys.shape[1] == 0:
        return index_q.sum() * 0.0
    heads = mixing.index_head_scores(index_q[:, rows], keys, index_scale)
    scores = mixing.index_scores(heads, index_weights[:, rows])
    hidden = ~mixing.visible_entries(T, ratio, q.device)[rows]
    log_share = scores.masked_fill(hidden, float("-inf")).log_softmax(dim=-1).masked_fill(hidden, 0.0)
    divergence = (torch.xlogy(target, target) - target * log_share).sum(dim=-1)
    idle = F.relu(IDLE_BELOW - heads.amax(dim=2)).masked_fill(hidden, 0.0)
    return divergence.mean() + idle.mean()
